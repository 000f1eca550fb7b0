"""GPT-2: the published size and first loss, exactness of padding, ties, optimizer groups."""

import math

import pytest
import torch
import torch.nn.functional as F

from gradsync.errors import ConfigError
from gradsync.model.gpt2 import GPT2, IGNORED_TARGET, PRESETS, GPT2Config

_TINY = GPT2Config(num_layers=2, num_heads=2, width=16, context=8, vocab_size=50)


def _model(config: GPT2Config = _TINY, seed: int = 0) -> GPT2:
    torch.manual_seed(seed)
    return GPT2(config)


def _tokens(config: GPT2Config = _TINY, batch: int = 3, length: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


def _copy_unpadded(model: GPT2) -> GPT2:
    """The same model without padded rows."""
    config = model.config
    bare = GPT2(
        GPT2Config(
            config.num_layers,
            config.num_heads,
            config.width,
            config.context,
            config.vocab_size,
            padded_vocab_size=config.vocab_size,
        )
    )
    state = model.state_dict()
    for name in ("transformer.wte.weight", "lm_head.weight"):
        state[name] = state[name][: config.vocab_size]
    bare.load_state_dict(state)
    return bare


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("gpt2", 124_439_808),
        ("medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("xl", 1_557_611_200),
    ],
)
def test_the_published_sizes(preset: str, expected: int) -> None:
    with torch.device("meta"):
        model = GPT2(GPT2Config.preset(preset))
    assert model.num_parameters() == expected
    assert model.config.padded_vocab_size == 50304


def test_small_presets_are_as_large_as_they_say() -> None:
    assert 1e6 < _model(GPT2Config.preset("tiny")).num_parameters() < 3e6
    assert 2.5e6 < _model(GPT2Config.preset("small")).num_parameters() < 4e6


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    config = GPT2Config.preset("tiny", vocab_size=50257, context=32)
    tokens = _tokens(config, batch=8, length=32)
    with torch.no_grad():
        _, loss = _model(config)(tokens, tokens.roll(1))
    assert loss is not None
    assert float(loss) == pytest.approx(math.log(50257), abs=0.15)


def test_a_preset_takes_other_sizes() -> None:
    config = GPT2Config.preset("gpt2", vocab_size=257, context=64, dropout=0.1, bias=False)
    assert (config.vocab_size, config.padded_vocab_size, config.context) == (257, 320, 64)
    assert (config.dropout, config.bias) == (0.1, False)
    assert not any(
        name.endswith("bias") for name, _ in _model(GPT2Config.preset("tiny", bias=False)).named_parameters()
    )


def test_every_preset_name_is_known() -> None:
    assert {GPT2Config.preset(name).num_layers for name in PRESETS} == {4, 12, 24, 36, 48}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 15}, "width 15 does not divide by 2 heads"),
        ({"num_layers": 0}, "num_layers of at least 1"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"padded_vocab_size": 40}, "smaller than the vocabulary"),
    ],
)
def test_a_shape_that_cannot_work_is_refused(changes: dict[str, float], message: str) -> None:
    shape = {"num_layers": 2, "num_heads": 2, "width": 16, "context": 8, "vocab_size": 50}
    with pytest.raises(ConfigError, match=message):
        GPT2Config(**(shape | changes))  # type: ignore[arg-type]


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'small'"):
        GPT2Config.preset("smal")


def test_padding_changes_neither_loss_nor_gradients() -> None:
    padded = _model()
    bare = _copy_unpadded(padded)
    tokens = _tokens()
    for model in (padded, bare):
        _, loss = model(tokens, tokens.roll(1, dims=1))
        loss.backward()
    for (name, p), (_, b) in zip(padded.named_parameters(), bare.named_parameters(), strict=True):
        # The product over more rows may be summed in another order.
        torch.testing.assert_close(p.grad[: len(b)], b.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_padded_rows_stay_zero_through_training() -> None:
    model = _model()
    optimizer = model.configure_optimizers(0.1, 1e-2, "cpu")
    for _ in range(3):
        model(_tokens(), _tokens().roll(1, dims=1))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = model.transformer.wte.weight
    assert rows.shape[0] == 64
    assert torch.count_nonzero(rows[50:]) == 0
    assert torch.count_nonzero(rows[:50]) > 0


def test_logits_have_the_real_vocabulary_alone() -> None:
    logits, loss = _model()(_tokens())
    assert logits.shape == (3, 8, 50)
    assert loss is None


def test_sum_and_mean_count_the_same_targets() -> None:
    model, tokens = _model(), _tokens()
    targets = tokens.roll(1, dims=1)
    targets[0, 3:] = IGNORED_TARGET
    targets[2] = IGNORED_TARGET
    logits, mean = model(tokens, targets)
    _, total = model(tokens, targets, reduction="sum")
    counted = targets != IGNORED_TARGET
    expected = F.cross_entropy(logits[counted], targets[counted])
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(total, expected * counted.sum())


def test_targets_that_are_all_ignored_give_a_zero_sum_and_zero_gradients() -> None:
    model, tokens = _model(), _tokens()
    _, loss = model(tokens, torch.full_like(tokens, IGNORED_TARGET), reduction="sum")
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.count_nonzero(p.grad) == 0 for p in model.parameters())


def test_the_loss_is_computed_in_float32_under_autocast() -> None:
    model, tokens = _model(), _tokens()
    targets = tokens.roll(1, dims=1)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens, targets)
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(loss, model(tokens, targets)[1], rtol=1e-2, atol=1e-2)


def test_no_token_sees_a_later_one() -> None:
    model, tokens = _model(), _tokens()
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 50
    with torch.no_grad():
        before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_attention_is_that_of_the_formula() -> None:
    attention = _model().transformer.h[0].attn
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    query, key, value = attention.c_attn(x).split(16, dim=2)
    heads = []
    for head in range(2):
        channels = slice(head * 8, head * 8 + 8)
        scores = query[..., channels] @ key[..., channels].transpose(1, 2) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ value[..., channels])
    torch.testing.assert_close(attention(x), attention.c_proj(torch.cat(heads, dim=-1)))


def test_checkpointing_gives_the_same_gradients_with_dropout_on() -> None:
    config = GPT2Config(2, 2, 16, 8, 50, dropout=0.2)
    gradients = []
    for checkpointing in (False, True):
        model = _model(config)
        model.activation_checkpointing = checkpointing
        torch.manual_seed(7)
        model(_tokens(), _tokens().roll(1, dims=1))[1].backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def test_checkpointing_keeps_less_for_backward() -> None:
    def kept_bytes(checkpointing: bool) -> int:
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model = _model()
        model.activation_checkpointing = checkpointing
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(_tokens(), _tokens())
        return sum(kept.values())

    assert kept_bytes(True) < kept_bytes(False) / 2


def test_head_and_embedding_are_one_parameter() -> None:
    model = _model()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert {"lm_head.weight", "transformer.wte.weight"} <= set(model.state_dict())


def test_names_are_those_of_the_published_model() -> None:
    names = {name for name, _ in _model().named_parameters() if ".h.1." in name or ".h." not in name}
    layer = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    expected = {f"transformer.h.1.{part}.{kind}" for part in layer for kind in ("weight", "bias")}
    expected |= {f"transformer.{name}" for name in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")}
    assert names == expected


def test_a_model_built_on_meta_can_be_tied_and_initialised() -> None:
    with torch.device("meta"):
        model = GPT2(_TINY)
    model.to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(3)
    model.init_weights()
    torch.manual_seed(3)
    direct = GPT2(_TINY)
    torch.manual_seed(3)
    direct.init_weights()
    for (name, a), (_, b) in zip(model.named_parameters(), direct.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_residual_projections_start_smaller() -> None:
    model = _model(GPT2Config(8, 2, 64, 8, 50))
    blocks = model.transformer.h
    residual = torch.cat([m.flatten() for b in blocks for m in (b.attn.c_proj.weight, b.mlp.c_proj.weight)])
    plain = torch.cat([m.flatten() for b in blocks for m in (b.attn.c_attn.weight, b.mlp.c_fc.weight)])
    assert plain.std().item() == pytest.approx(0.02, rel=0.02)
    assert residual.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.02)


def test_only_matrices_decay() -> None:
    model = _model()
    model.transformer.wpe.weight.requires_grad_(False)
    optimizer = model.configure_optimizers(0.1, 3e-4, "cpu")
    decayed, plain = optimizer.param_groups
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in plain["params"]} == {1}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert (decayed["lr"], decayed["betas"], decayed["eps"]) == (3e-4, (0.9, 0.95), 1e-8)
    assert decayed["fused"]
    grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert grouped == {id(p) for p in model.parameters() if p.requires_grad}


def test_flops_are_near_those_of_the_usual_estimate() -> None:
    with torch.device("meta"):
        model = GPT2(GPT2Config.preset("gpt2"))
    # 6 per weight in a product, and attention over 1024 positions.
    expected = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert model.estimate_flops_per_token() == expected


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="9 tokens is longer than the model's context of 8"):
        _model()(_tokens(length=9))


def test_it_learns() -> None:
    model = _model()
    optimizer = model.configure_optimizers(0.0, 1e-2, "cpu")
    tokens = torch.arange(8).repeat(2, 1)
    for _ in range(60):
        _, loss = model(tokens, (tokens + 1) % 8)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
