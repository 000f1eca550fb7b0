"""Completion tasks: the ending that the model finds likeliest, with and without regard to its length."""

import json

import pytest
import torch

from gradsync.data.tokenizer import ByteTokenizer
from gradsync.errors import ConfigError, DataError
from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.parallel.replica import replica_of
from gradsync.train.completions import Example, completion_accuracy, read_examples
from gradsync.train.ranks import Alone, Group

CPU = torch.device("cpu")
TOKENIZER = ByteTokenizer()


def model_that_likes(letter: str, context: int = 32, weight: float = 1.0) -> GPT2:
    """Finds one byte likelier than all others, wherever it stands."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(1, 1, 8, context, 257))
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[ord(letter)] = weight
    return model


def accuracy(model, *examples):
    found = completion_accuracy(replica_of(model), TOKENIZER, list(examples), Alone(), CPU)
    return found.by_sum, found.by_mean


def test_the_likeliest_ending_is_chosen():
    model = model_that_likes("a")
    assert accuracy(model, Example("x", ("bbb", "aaa", "ccc"), 1)) == (1.0, 1.0)
    assert accuracy(model, Example("x", ("bbb", "aaa", "ccc"), 0)) == (0.0, 0.0)


def test_length_counts_in_one_figure_only():
    # Every token costs something, so the short ending is likelier as a whole and the long one by token.
    example = Example("x", ("bb", "aaaaaaaaaaaa"), 1)
    assert accuracy(model_that_likes("a", weight=0.25), example) == (0.0, 1.0)


def test_the_context_loses_its_beginning_where_it_is_too_long():
    model = model_that_likes("a", context=8)
    assert accuracy(model, Example("x" * 50, ("bbb", "aaa"), 1), Example("", ("b" * 50, "a" * 50), 1)) == (1.0, 1.0)


def test_the_score_is_the_sum_over_the_ending_only():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(2, 2, 16, 32, 257)).eval()
    endings = ("one", "three more")
    sums = []
    for ending in endings:
        ids = TOKENIZER.encode("some text " + ending).tolist()
        with torch.no_grad():
            scores = model(torch.tensor([ids]))[0][0].log_softmax(-1)
        first = len("some text")
        sums.append(sum(float(scores[at - 1, ids[at]]) for at in range(first, len(ids))))
    best = sums.index(max(sums))
    assert accuracy(model, Example("some text", endings, best))[0] == 1.0


def test_the_ranks_share_the_examples(ranks):
    assert ranks(_accuracy_on_rank) == [(2 / 3, 2 / 3, 3)] * 2


def _accuracy_on_rank(rank, world):
    examples = [Example("x", ("bbb", "aaa"), label) for label in (1, 0, 1)]
    found = completion_accuracy(replica_of(model_that_likes("a"), rank, world), TOKENIZER, examples, Group(), CPU)
    return found.by_sum, found.by_mean, found.examples


def test_the_published_form_is_read(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps({"ind": 4, "ctx": "A man", "endings": ["sits.", "runs."], "label": 1}) + "\n\n")
    assert read_examples(path) == [Example("A man", ("sits.", "runs."), 1)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no example"),
        ('{"ctx": "a", "endings": ["b"], "label": 0}\nnot json', "file.jsonl:2: expected an object"),
        ('{"ctx": "a"}', r"file.jsonl:1: expected an object with ctx \(text\), endings"),
        ('{"ctx": "a", "endings": ["b"], "label": 3}', "label 3 is not the number of one of 1 endings"),
        ('{"ctx": "a", "endings": "bcd", "label": 1}', r"endings \(a list of texts\).*got .*bcd"),
        ('{"ctx": "a", "endings": ["b", ""], "label": 1}', "file.jsonl:1: expected"),
        ('{"ctx": "a", "endings": ["b", 5], "label": 1}', "file.jsonl:1: expected"),
        ('{"ctx": "a", "endings": ["b", "c"], "label": true}', "file.jsonl:1: expected"),
        ('{"ctx": "a", "endings": ["b", "c"], "label": 1.5}', "file.jsonl:1: expected"),
        ('{"ctx": "a", "endings": ["b", "c"], "label": ""}', "file.jsonl:1: expected"),
        ('{"ctx": null, "endings": ["b", "c"], "label": 0}', "file.jsonl:1: expected"),
        ('{"ctx": "a", "endings": [], "label": 0}', "label 0 is not the number of one of 0 endings"),
        ("[1]", "file.jsonl:1: expected"),
        ("[" * 100_000, "file.jsonl:1: expected"),
    ],
)
def test_what_is_no_example_is_named(tmp_path, content, message):
    path = tmp_path / "file.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_examples(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl does not exist"):
        read_examples(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        read_examples(tmp_path)


def test_a_line_ends_at_a_newline_only(tmp_path):
    path = tmp_path / "file.jsonl"
    lines = [{"ctx": "a\u2028b\x85c", "endings": ["d\u2029", "e"], "label": "1"}] * 2
    path.write_text("\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8", newline="")
    assert read_examples(path) == [Example("a\u2028b\x85c", ("d\u2029", "e"), 1)] * 2
