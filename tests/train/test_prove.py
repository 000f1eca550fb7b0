"""The proof passes where it should, and a wrong layout, loss or value does not get through."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradsync.errors import ConfigError, UserCodeError
from gradsync.model.factory import load_factory
from gradsync.parallel.degrees import Degrees
from gradsync.train.prove import Trace, compare, difference_of, run_jointly, run_plainly, run_trainee
from gradsync.train.prove_cases import Case, GPTSubject, UserSubject, cases, joint_cases, sequences_for

CPU = torch.device("cpu")
STEPS = 2


def test_units_in_the_last_place():
    one = torch.tensor([1.0])
    above = torch.nextafter(one, torch.tensor([2.0]))
    assert difference_of(above, one).ulps == 1
    assert difference_of(torch.tensor([1.0, 1e-7]), torch.tensor([1.0, -1e-7])).ulps == pytest.approx(1.68, abs=0.01)
    assert difference_of(one, one).absolute == 0.0
    assert difference_of(torch.tensor([float("nan")]), one).absolute == float("inf")


def test_the_first_parameter_beyond_tolerance_is_named():
    reference = Trace([1.0], [1.0], {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)})
    off = {"a": torch.ones(2), "b": torch.tensor([1.0, 1.1]), "c": torch.zeros(2)}
    found = compare(Case("x"), replace(reference, parameters=off), reference)
    assert (found.first_parameter, found.has_passed) == ("b", False)
    assert compare(Case("x"), reference, reference).has_passed
    assert not compare(Case("x"), replace(reference, losses=[1.001]), reference).has_passed
    assert not compare(Case("x"), replace(reference, norms=[float("nan")]), reference).has_passed


def test_one_process_is_the_plain_loop_to_the_last_bit():
    found = compare(
        Case("alone"), run_trainee(Case("alone"), GPTSubject(), STEPS, CPU), run_plainly(GPTSubject(), STEPS, CPU)
    )
    assert found.has_passed
    assert found.parameters.absolute < 1e-6


def _prove(rank, world, rows, model):
    import sys

    sys.path.insert(0, str(Path(__file__).parent))
    subject = GPTSubject() if model is None else UserSubject(model)
    traces = [run_trainee(row, subject, STEPS, CPU) for row in rows]
    if rank == 0:
        reference = run_plainly(subject, STEPS, CPU)
        return [compare(row, trace, reference) for row, trace in zip(rows, traces, strict=True)]
    return []


def rows_on(world, *names):
    return [row for row in cases("gloo", []) if row.world == world and (not names or row.name in names)]


def test_all_rows_on_two_processes_pass(ranks):
    findings = ranks(_prove, rows_on(2), None, timeout_s=150)[0]
    assert len(findings) == 10
    assert [finding for finding in findings if not finding.has_passed] == []


def test_the_users_own_model_passes_where_its_loss_is_a_mean(ranks):
    rows = [row for row in rows_on(2) if not row.needs_layout]
    findings = ranks(_prove, rows, "own_models:mean_of_rows", timeout_s=150)[0]
    assert len(findings) == 5
    assert [finding for finding in findings if not finding.has_passed] == []


def test_buffers_are_whole_on_every_rank_of_fsdp(ranks):
    findings = ranks(_prove, rows_on(2, "FSDP"), "own_models:with_buffers")[0]
    assert [finding.has_passed for finding in findings] == [True]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own_models:loss_of_rows", r"the loss is a tensor of shape \(16, 3\); it must be one number"),
        ("own_models:loss_of_nothing", "does not depend on a parameter"),
        ("own_models:never_finite", "step 1 of one plain process has loss nan"),
    ],
)
def test_a_loss_that_one_plain_process_cannot_train_on_is_told(monkeypatch, path, message):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(UserCodeError, match=message):
        run_plainly(UserSubject(path), STEPS, CPU)


def test_a_loss_that_data_parallelism_cannot_average_is_found_out(ranks):
    findings = ranks(_prove, rows_on(2, "DDP on 2"), "own_models:sum_of_rows")[0]
    assert not findings[0].has_passed
    assert findings[0].loss.absolute > 0.1


def _jointly(rank, world):
    return run_jointly(joint_cases(world, "gloo"), GPTSubject(sequences_for(world)), 1, CPU)


def test_ranks_of_a_launcher_run_every_row_together(ranks3):
    """Three ranks: the batch is as large as they need, and every one of them learns the findings."""
    everyone = ranks3(_jointly, timeout_s=150)
    assert [finding.case.name for finding in everyone[0]][:2] == ["DDP", "DDP, accumulation"]
    assert all(finding.has_passed for findings in everyone for finding in findings)
    assert len(everyone[0]) == 5


def test_rows_of_launchers_take_all_ranks():
    for world in (1, 2, 3, 4, 6, 8):
        rows = joint_cases(world, "gloo")
        assert {row.world for row in rows} == {world}
        assert all(sequences_for(world) % (row.degrees.data * row.micro_batches) == 0 for row in rows)
    assert "DDP x tensor x pipeline" in [row.name for row in joint_cases(8, "gloo")]


def test_the_page_shows_the_rows_that_there_are():
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    table = page.split("<!-- prove -->")[1].split("<!-- /prove -->")[0]
    shown = [line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│")]
    rows = [row.name for row in cases("shm", ["gloo"])]
    assert shown == rows
    assert f"{len(rows)} of {len(rows)} rows passed" in table


def test_there_is_a_row_for_everything():
    names = [row.name for row in cases("gloo", ["shm"])]
    assert len(set(names)) == len(names)
    assert {"one process", "DDP on 4", "ZeRO", "FSDP", "DDP x tensor", "DDP x pipeline", "FSDP x tensor"} <= set(names)
    assert "DDP on 2, shm" in names
    assert sum("sequence" in name for name in names) == 4
    assert max(row.world for row in cases("gloo", [])) == 4
    assert Degrees(1, 2) in [row.degrees for row in cases("gloo", [])]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own_models:missing", "give MODULE:FUNCTION"),
        ("no_such_module:f", "give MODULE:FUNCTION"),
        ("own_models:no_model", "must return"),
        ("own_models:odd_batch", "must be a multiple of 16"),
        ("own_models:all_frozen", "no parameter that requires a gradient"),
        ("own_models:no_rows", "the batch holds no tensor"),
    ],
)
def test_a_wrong_factory_is_refused(monkeypatch, path, message):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(ConfigError, match=message):
        UserSubject(path)


def test_a_factory_gives_the_same_model_each_time(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    factory = load_factory("own_models:mean_of_rows")
    one, other = factory.build().state_dict(), factory.build().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
