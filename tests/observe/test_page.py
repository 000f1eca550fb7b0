"""The report page: complete, offline, safe against what a run holds, and drawn by a real browser."""

import json
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.cli.main import main
from gradsync.observe.page import MAX_POINTS, read_run, render, thin_out

NASTY = "</script><img src=x onerror=\"document.title='owned'\">&amp;<!--"


@pytest.fixture
def run_folder(tmp_path):
    return make_run(tmp_path / "first")


def make_run(folder, lr=0.1, num_steps=100):
    (folder / "samples").mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            record = {"step": step, "loss": 5 / step, "lr": lr, "grad_norm": 1.5, "tokens_per_s": 1000.0 + step}
            if step % 50 == 0:
                record |= {"val_loss": 5.5 / step, "accuracy": 0.25, "accuracy_normalised": 0.5}
            if step in (7, 8, 11):
                record |= {"loss": None, "skipped": True}
            file.write(json.dumps(record) + "\n")
    start = {"time": 1.7e9, "step": 0, "ranks": 2, "device": "cpu", "host": NASTY, "torch": "2.13"}
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    (folder / "config.yaml").write_text(f"steps: 100\nlr: {lr}\ndata: text.txt\n")
    for step in (50, 100):
        (folder / "samples" / f"step-{step:08d}.txt").write_text(f"{NASTY} at {step}")
    return folder


def data_of(page):
    return json.loads(re.search(r"const RUNS = (.*);\n", page)[1])


def test_everything_of_a_run_is_on_the_page(run_folder):
    (run,) = data_of(render([read_run(run_folder, "first", {"steps": 100})]))
    assert run["steps"] == 100
    assert run["skipped"] == [7, 8, 11]
    assert len(run["curves"]["loss"]) == 97
    assert run["curves"]["val_loss"] == [[50, 0.11], [100, 0.055]]
    assert run["samples"] == [[50, f"{NASTY} at 50"], [100, f"{NASTY} at 100"]]
    assert run["starts"][0]["ranks"] == 2


def test_what_is_damaged_in_a_run_folder_does_not_cost_the_page(run_folder):
    for name in ("metrics.jsonl", "starts.jsonl"):
        with (run_folder / name).open("a") as file:
            file.write('{"step": 101, "lo{"step": 102, "loss": 1.0}\n[1]\n{"ste')
    (run_folder / "samples" / "step-00000100.txt").write_bytes(b"\xff text")
    (run_folder / "samples" / "step-final.txt").write_text("not ours")
    (run,) = data_of(render([read_run(run_folder, "first", {"steps": 100})]))
    assert run["steps"] == 100
    assert len(run["starts"]) == 1
    assert run["samples"][1] == [100, "\ufffd text"]


def test_the_page_needs_no_network_and_what_a_run_holds_is_no_markup(run_folder):
    page = render([read_run(run_folder, NASTY, {"note": NASTY})])
    assert page.count("</script>") == 1
    assert "<img" not in page
    addresses = set(re.findall(r"https?://[^\"' ]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a namespace, never fetched
    assert not re.search(r"(src|href)=\"(?!data:)", page)


def test_a_run_that_has_not_begun_can_be_reported(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 5\n")
    (run,) = data_of(render([read_run(tmp_path, "empty", {})]))
    assert (run["steps"], run["samples"], run["starts"]) == (0, [], [])


points = st.lists(st.floats(-10, 10), min_size=1, max_size=3 * MAX_POINTS).map(lambda ys: list(enumerate(ys)))


@given(points)
def test_thinning_keeps_the_order_and_every_peak(curve):
    kept = thin_out(curve)
    assert len(kept) <= MAX_POINTS
    assert kept == sorted(set(kept))
    assert set(kept) <= set(curve)
    values = [value for _, value in curve]
    assert min(values) in [value for _, value in kept]
    assert max(values) in [value for _, value in kept]


def test_the_command_compares_runs(run_folder, tmp_path, capsys):
    other = make_run(tmp_path / "second", lr=0.2)
    assert main(["report", str(run_folder), str(other)]) == 0
    assert capsys.readouterr().out.strip() == str(run_folder / "report.html")
    runs = data_of((run_folder / "report.html").read_text())
    assert [run["name"] for run in runs] == ["first", "second"]
    assert main(["report", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_browser_draws_it(run_folder, tmp_path, num_runs):
    folders = [run_folder, make_run(tmp_path / "second", lr=0.2)][:num_runs]
    page = tmp_path / "report.html"
    page.write_text(
        render([read_run(folder, folder.name, {"steps": 100, "lr": i}) for i, folder in enumerate(folders)])
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(BROWSER), *flags, "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    drawn = dom.partition("</script>")
    body = drawn[0].partition("<script>")[0] + drawn[2]
    assert 'data-state="drawn"' in dom, "the page's script failed"
    assert "<title>gradsync: first" in dom
    assert sorted(re.findall(r'data-chart="(\w+)"', body)) == ["accuracy", "grad_norm", "loss", "lr", "tokens_per_s"]
    assert body.count("<svg") == 5
    assert body.count("<img") == 0
    assert "at 100" in body
    assert "7 to 8, 11" in body
    assert ('class="differs"' in body) == (num_runs == 2)
