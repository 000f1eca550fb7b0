"""GPT-2 to and from the form of the transformers library: the same logits, and clear refusals."""

import json

import pytest
import torch

from gradsync.errors import ConfigError, DataError
from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.model.huggingface import export_gpt2, import_gpt2

pytest.importorskip("safetensors")


def make_model(**changes) -> GPT2:
    torch.manual_seed(3)
    model = GPT2(GPT2Config(2, 2, 16, 12, 101, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # biases and norms are not left at 0 and 1
    return model


TOKENS = torch.arange(24).view(2, 12) % 101


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS)[0]


def test_there_and_back_is_the_same_model(tmp_path):
    model = make_model()
    export_gpt2(model, tmp_path, end_of_text=100)
    again = import_gpt2(tmp_path)
    assert again.config == model.config
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("bias", [True, False])
def test_transformers_computes_the_same_logits(tmp_path, bias):
    transformers = pytest.importorskip("transformers")
    model = make_model(bias=bias)
    export_gpt2(model, tmp_path, end_of_text=100)
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        found = theirs.eval()(TOKENS).logits
    assert found.shape == (2, 12, 101)
    assert torch.allclose(found, logits(model), atol=1e-5, rtol=0)


def test_what_transformers_has_saved_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=101, n_positions=12, n_embd=16, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    assert torch.allclose(logits(import_gpt2(tmp_path)), expected, atol=1e-5, rtol=0)


def test_names_without_the_prefix_and_old_masks_are_understood(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make_model()
    export_gpt2(model, tmp_path, end_of_text=100)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 12, 12)
    save_file(bare, tmp_path / "model.safetensors")
    assert torch.equal(logits(import_gpt2(tmp_path)), logits(model))


def test_weights_in_several_files_are_read(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make_model()
    export_gpt2(model, tmp_path, end_of_text=100)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert torch.equal(logits(import_gpt2(tmp_path)), logits(model))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "llama"}, ConfigError, "type 'llama'"),
        ({"activation_function": "relu"}, ConfigError, "activation_function is 'relu'"),
        ({"tie_word_embeddings": False}, ConfigError, "tie_word_embeddings is False"),
        ({"n_inner": 7}, ConfigError, "n_inner is 7"),
        ({"n_positions": 13}, DataError, "wpe.weight has shape"),
        ({"n_layer": 3}, DataError, r"lacks the weight transformer\.h\.2"),
    ],
)
def test_another_model_is_refused(tmp_path, change, error, message):
    export_gpt2(make_model(), tmp_path, end_of_text=100)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(error, match=message):
        import_gpt2(tmp_path)


def test_a_folder_without_a_model_and_a_damaged_one_are_refused(tmp_path):
    with pytest.raises(DataError, match="expected a Hugging Face model folder"):
        import_gpt2(tmp_path)
    export_gpt2(make_model(), tmp_path, end_of_text=100)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged|cannot be read"):
        import_gpt2(tmp_path)
