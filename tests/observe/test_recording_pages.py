"""Pages with a recording: the report's timeline, the profile's page, the explanation in two languages."""

import json
import re
import shutil
import string
import subprocess

import pytest
from recordings import make_recording

from gradsync.observe.explain_page import LANGUAGES, render_explanation
from gradsync.observe.explain_texts import TEXTS
from gradsync.observe.page import read_run, render, render_recording

NASTY = "</script><img src=x onerror=\"document.title='owned'\">&amp;<!--"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def make_story(name="net1.weight", model="SimpleModel", is_equal=True):
    recording = make_recording(name)
    for rank in recording["ranks"]:
        for record in rank["passes"]:
            record["gradients"] = [{"name": name, "at_s": 0.035}, {"name": "a", "at_s": 0.059}]

    def of_rank(rank):
        sums = {key: f"00{rank}abc" for key in ("checksum_built",)} | {"checksum_wrapped": "77aa"}
        sums["checksum_end"] = "99ff" if is_equal or rank == 0 else "1234"
        return {
            "rank": rank,
            "pid": "71",
            "host": "here",
            "threads": 1,
            "value_built": 0.5 + rank,
            "value_wrapped": 0.5,
        } | sums

    return {
        "model": model,
        "command": "gradsync explain",
        "version": "0",
        "torch": "2",
        "nproc": 2,
        "steps": 8,
        "num_parameters": 121,
        "num_tensors": 4,
        "backend": "gloo",
        "cap_bytes": 100,
        "recording": recording,
        "processes": [of_rank(0), of_rank(1)],
        "last_losses": [1.5, 2.5],
        "shown": {"name": name, "index": [1, 2], "bucket": 0, "offset_bytes": 16},
        "average": [{"rank": 0, "local": 0.25, "result": -0.5}, {"rank": 1, "local": -1.25, "result": -0.5}],
        "average_pass": 8,
        "last_pass": 7,
        "order": {"first": name, "first_s": 0.005, "last": "a", "last_s": 0.03, "num_early": 1},
        "no_sync": {"num_passes": 0, "rows": [{"rank": r, "first": 1.0, "second": 2.0, "result": 3.0} for r in (0, 1)]},
        "unused": {
            "lonely": "only_on_rank_0",
            "spare": "used_nowhere",
            "lonely_used": 1,
            "spare_used": 0,
            "rows": [
                {"rank": r, "lonely_local": None, "lonely_result": 0.5, "spare_local": None, "spare_result": None}
                for r in (0, 1)
            ],
        },
    }


def fields(text):
    return sorted(name for _, name, _, _ in string.Formatter().parse(text) if name)


def test_both_languages_say_the_same_things():
    english, chinese = TEXTS["en"], TEXTS["zh"]
    assert list(english) == list(chinese)
    # Chinese may leave a number out where it would only repeat it
    assert [key for key in english if not set(fields(chinese[key])) <= set(fields(english[key]))] == []
    assert re.findall(r"[\u4e00-\u9fff]", "".join(english.values())) == []


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_explanation_tells_this_runs_numbers(lang):
    page = render_explanation(make_story(), lang)
    for number in (
        "0.25",
        "\N{MINUS SIGN}1.25",
        "\N{MINUS SIGN}0.5",
        "net1.weight[1, 2]",
        "4.1 ms",
        "1.5, 2.5",
        "61 %",
    ):
        assert number in page
    assert f'<html lang="{lang}">' in page
    assert page.count("<h2>") == 10
    assert "{" not in re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)


def test_replicas_that_differ_are_not_called_equal():
    assert TEXTS["en"]["is_equal"] in render_explanation(make_story(), "en")
    page = render_explanation(make_story(is_equal=False), "en")
    assert TEXTS["en"]["is_equal"] not in page
    assert TEXTS["en"]["is_different"] in page


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"ranks": []}'])
def test_a_damaged_recording_does_not_spoil_the_report(tmp_path, content):
    (tmp_path / "timeline.json").write_text(content)
    assert read_run(tmp_path, "run", {}).timeline is None


def pages(folder):
    (folder / "timeline.json").write_text(json.dumps(make_recording(NASTY)))
    return {
        "report": render([read_run(folder, NASTY, {})]),
        "profile": render_recording(make_recording(NASTY), NASTY),
        "explain": render_explanation(make_story(NASTY, NASTY), "en"),
    }


@pytest.mark.parametrize("kind", ["report", "profile", "explain"])
def test_pages_need_no_network_and_names_are_no_markup(tmp_path, kind):
    page = pages(tmp_path)[kind]
    assert page.count("</script>") == 1
    assert "<img" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"(src|href)=\"(?!data:)", page)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
@pytest.mark.parametrize(("kind", "num_drawings"), [("report", 3), ("profile", 3), ("explain", 4)])
def test_a_browser_draws_them(tmp_path, kind, num_drawings):
    path = tmp_path / "page.html"
    path.write_text(pages(tmp_path)[kind])
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(BROWSER), *flags, "--virtual-time-budget=2000", "--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    drawn = dom.partition("</script>")
    body = drawn[0].partition("<script>")[0] + drawn[2]
    assert 'data-state="drawn"' in dom, "the page's script failed"
    assert body.count("<svg") == num_drawings
    assert "<img" not in body
    assert "rank 1, bucket 1: launched 61.0 ms, done 69.0 ms, waited 8.0 ms; holds a, b" in body
