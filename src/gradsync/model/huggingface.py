"""GPT-2 in the form of the ``transformers`` library: a folder of ``config.json`` and safetensors.

Names are the same on both sides. What differs: its projections are Conv1D (weights transposed against
``nn.Linear``), its vocabulary has no padding, the tied head is not stored, and norms and projections
always have biases. Reading executes nothing. Needs ``safetensors``, not ``transformers``.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsync.errors import ConfigError, DataError, MissingExtraError
from gradsync.model.gpt2 import GPT2, GPT2Config

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PREFIX = "transformer."
_HEAD = "lm_head.weight"
_CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# Masks that older files carry; they are no parameters.
_BUFFERS = (".attn.bias", ".attn.masked_bias")
# What GPT2 here computes; a file that says otherwise would load and give other logits.
_ONLY = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def export_gpt2(model: GPT2, folder: Path, end_of_text: int) -> None:
    """Write a model so that ``GPT2LMHeadModel.from_pretrained`` loads it and gives the same logits.

    Raises:
        MissingExtraError: safetensors is not installed.
        OSError: the folder cannot be written.
    """
    save_file = _safetensors().save_file
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _exported_tensors(model)
    try:
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    except Exception as error:  # safetensors' own error, whatever the disk said, has no public name in all versions
        raise OSError(f"{folder / _WEIGHTS}: {error}") from error
    config = _exported_config(model.config, end_of_text)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def import_gpt2(folder: Path) -> GPT2:
    """Read a model from such a folder.

    Raises:
        DataError: a file is missing or damaged, or weights are missing.
        ConfigError: it is no GPT-2, or one that computes something that ours does not.
        MissingExtraError: safetensors is not installed.
    """
    model = GPT2(read_config(folder))
    given = {_full_name(name): tensor for name, tensor in _read_tensors(folder).items()}
    vocab_size = model.config.vocab_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in given:
                raise DataError(f"{folder} lacks the weight {name}; is it a whole GPT-2?")
            tensor = given[name].T if name.endswith(_CONV1D) else given[name]
            target = parameter[:vocab_size] if name == "transformer.wte.weight" else parameter
            if target.shape != tensor.shape:
                raise DataError(f"{folder}: {name} has shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
            target.copy_(tensor)
    return model


def read_config(folder: Path) -> GPT2Config:
    """Read the shape of the model in a folder; errors as in ``import_gpt2``."""
    path = folder / _CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; expected a Hugging Face model folder") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} holds no model's configuration, but a JSON {type(config).__name__}")
    _check_is_ours(path, config)
    try:
        return GPT2Config(
            num_layers=config["n_layer"],
            num_heads=config["n_head"],
            width=config["n_embd"],
            context=config["n_positions"],
            vocab_size=config["vocab_size"],
        )
    except KeyError as error:
        raise DataError(f"{path} lacks {error}") from error


def _check_is_ours(path: Path, config: dict[str, Any]) -> None:
    if config.get("model_type") != "gpt2":
        raise ConfigError(f"{path} describes a model of type {config.get('model_type')!r}; only 'gpt2' can be loaded")
    for name, allowed in _ONLY.items():
        if config.get(name, allowed[0]) not in allowed:
            raise ConfigError(f"{path}: {name} is {config[name]!r}; this GPT-2 computes with {allowed[0]!r} only")
    inner, width = config.get("n_inner"), config.get("n_embd")
    if inner is not None and not (isinstance(width, int) and inner == 4 * width):
        raise ConfigError(f"{path}: n_inner is {inner}; this GPT-2 has four times the width")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    load_file = _safetensors().load_file
    try:
        if (folder / _INDEX).is_file():
            names = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
            files = [folder / Path(name).name for name in sorted(names)]
        else:
            files = [folder / _WEIGHTS]
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the weights in {folder} cannot be read: {error}") from error
    except Exception as error:  # safetensors' own error has no public name in all versions
        raise DataError(f"the weights in {folder} are damaged: {error}") from error


def _full_name(name: str) -> str:
    is_complete = name.startswith(_PREFIX) or name == _HEAD or name.endswith(_BUFFERS)
    return name if is_complete else _PREFIX + name


def _exported_tensors(model: GPT2) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().cpu()
        if name == "transformer.wte.weight":
            tensor = tensor[: model.config.vocab_size]
        tensors[name] = (tensor.T if name.endswith(_CONV1D) else tensor).contiguous()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm) and module.bias is None and name != "lm_head":
            tensors[f"{name}.bias"] = torch.zeros(module.weight.shape[0])
    return tensors


def _exported_config(config: GPT2Config, end_of_text: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.width,
        "n_positions": config.context,
        "vocab_size": config.vocab_size,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        **{name: allowed[0] for name, allowed in _ONLY.items()},
    }


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError(
            "Hugging Face folders need safetensors; install it with: pip install 'gradsync[huggingface]'"
        ) from error
    return safetensors.torch
