"""Sampling: greedy, top-k, seeds, stop tokens, the crop to the context."""

import pytest
import torch

from gradsync.errors import ConfigError, NonFiniteError
from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.model.sampling import generate, stream

_VOCAB = 30


@pytest.fixture
def model() -> GPT2:
    torch.manual_seed(0)
    return GPT2(GPT2Config(num_layers=1, num_heads=2, width=16, context=6, vocab_size=_VOCAB))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_greedy_takes_the_likeliest_token_of_the_cropped_context(model: GPT2) -> None:
    tokens = torch.tensor([[1, 2, 3, 4]])
    out = generate(model, tokens, 8, temperature=0.0)
    assert out.shape == (1, 12)
    with torch.no_grad():
        for end in range(4, 12):
            logits, _ = model(out[:, max(end - 6, 0) : end])
            assert int(logits[0, -1].argmax()) == int(out[0, end])


def test_the_seed_decides(model: GPT2) -> None:
    tokens = torch.zeros((2, 1), dtype=torch.int64)
    first, again, other = (generate(model, tokens, 20, generator=_seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_top_k_keeps_exactly_k_tokens(model: GPT2) -> None:
    tokens = torch.zeros((400, 1), dtype=torch.int64)
    new = generate(model, tokens, 1, top_k=3, generator=_seeded(0))[:, 1]
    likeliest = model.next_token_logits(tokens[:1]).topk(3).indices[0]
    assert set(new.tolist()) == set(likeliest.tolist())


def test_top_k_beyond_the_vocabulary_keeps_all_of_it_and_no_padding(model: GPT2) -> None:
    tokens = torch.zeros((3000, 1), dtype=torch.int64)
    new = generate(model, tokens, 1, temperature=50.0, top_k=1000, generator=_seeded(0))[:, 1]
    assert set(new.tolist()) == set(range(_VOCAB))


def test_temperature_sharpens(model: GPT2) -> None:
    tokens = torch.zeros((500, 1), dtype=torch.int64)
    likeliest = int(model.next_token_logits(tokens[:1]).argmax())
    share = [
        float((generate(model, tokens, 1, temperature=t, generator=_seeded(0))[:, 1] == likeliest).float().mean())
        for t in (0.01, 10.0)
    ]
    assert share[0] > 2 * share[1]


def test_a_tiny_temperature_is_greedy(model):
    tokens = torch.tensor([[1, 2]])
    greedy = generate(model, tokens, 8, temperature=0.0)
    assert torch.equal(generate(model, tokens, 8, temperature=1e-40), greedy)


def test_a_stopped_sequence_repeats_the_stop_token_and_all_stopped_ends(model: GPT2) -> None:
    tokens = torch.zeros((4, 1), dtype=torch.int64)
    free = generate(model, tokens, 60, generator=_seeded(5))
    stop = int(free[0, 3])
    out = generate(model, tokens, 600, generator=_seeded(5), stop_token=stop)
    assert out.shape[1] < 601
    for row in out[:, 1:].tolist():
        first = row.index(stop)
        assert set(row[first:]) == {stop}
    assert torch.equal(out[0, :4], free[0, :4])


def test_the_stream_is_the_same_text_and_leaves_the_model_in_training(model: GPT2) -> None:
    model.train()
    tokens = torch.tensor([[1, 2]])
    pieces = []
    for token in stream(model, tokens, 10, generator=_seeded(3)):
        assert model.training
        assert torch.is_grad_enabled()
        pieces.append(int(token))
    assert pieces == generate(model, tokens, 10, generator=_seeded(3))[0, 2:].tolist()


def test_dropout_is_off_while_sampling() -> None:
    torch.manual_seed(0)
    model = GPT2(GPT2Config(1, 2, 16, 6, _VOCAB, dropout=0.5))
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(generate(model, tokens, 8, 0.0), generate(model, tokens, 8, 0.0))


def test_no_new_tokens_is_the_prompt(model: GPT2) -> None:
    tokens = torch.tensor([[1, 2]])
    assert torch.equal(generate(model, tokens, 0), tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.zeros((1, 0), dtype=torch.int64)}, "at least one token"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, "of shape"),
        ({"num_new_tokens": -1}, "cannot be negative"),
        ({"temperature": -0.5}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": 0}, "top_k must be at least 1"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_the_call(
    model: GPT2, arguments: dict[str, object], message: str
) -> None:
    usual = {"tokens": torch.zeros((1, 1), dtype=torch.int64), "num_new_tokens": 1}
    with pytest.raises(ConfigError, match=message):
        stream(model, **(usual | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_has_diverged_is_told_of(temperature, value):
    model = GPT2(GPT2Config(1, 1, 8, 8, 10))
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(value)
    with pytest.raises(NonFiniteError, match="no token can be drawn: its training has diverged"):
        generate(model, torch.tensor([[1]]), 3, temperature)
