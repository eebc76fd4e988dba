"""`octavo kernels` as a user calls it, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from octavo.cli import main
from octavo.kernels.matmul.registry import RUNGS
from tests.cpu.inspect.test_pages import document


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["kernels", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_list_names_every_rung(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "list", "--long")
    assert status == 0
    for one in RUNGS:
        assert f"{one.name} " in out
        assert one.header["Idea"] in out


@pytest.mark.parametrize("action", ["bench", "device"])
def test_measuring_says_in_one_line_that_it_needs_a_gpu(
    action: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, out, err = call(capsys, action)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "needs a CUDA GPU" in err


@pytest.mark.parametrize("action", ["bench", "device"])
def test_nothing_is_measured_that_cannot_be_written(
    action: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = call(capsys, action, "--out", str(tmp_path))
    assert (status, out) == (2, "")
    assert err == f"octavo: error: --out: cannot write {tmp_path}: Is a directory\n"


def test_asm_prints_remarks_and_writes_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, _ = call(capsys, "asm", "02", "--notes")
    assert status == 0
    words = " ".join(out.split())
    assert "unrolled x4 in PTX" in words
    assert "x16 in SASS" in words
    page = tmp_path / "new" / "a.html"
    status, out, _ = call(capsys, "asm", "02_naive", "--html", str(page))
    assert (status, str(page) in out) == (0, True)
    assert "<title>02 Naive, coalesced</title>" in page.read_text()


def test_asm_reads_a_file_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = tmp_path / "mine.cu"
    source.write_text('extern "C" __global__ void mine(float* p) { p[threadIdx.x] *= 2.0f; }\n')
    status, out, _ = call(capsys, "asm", str(source))
    assert status == 0
    assert "FADD" in out or "FMUL" in out
    status, _, err = call(capsys, "asm", str(tmp_path / "absent.cu"))
    assert (status, "cannot read" in err) == (2, True)
    source.write_bytes(b"\xff")
    status, _, err = call(capsys, "asm", str(source))
    assert (status, f"{source} is not text" in err) == (2, True)
    source.write_text("this is no kernel\n")
    status, _, err = call(capsys, "asm", str(source))
    assert (status, "does not compile" in err) == (2, True)


@pytest.mark.parametrize("form", ["asm {}", "report {}", "report {} --device {}"])
def test_a_file_without_end_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str
) -> None:
    endless = tmp_path / "x.cu"
    endless.symlink_to("/dev/zero")
    run = tmp_path / "run.json"
    run.write_text(json.dumps(document()))
    words = form.format(*[endless] if form.count("{") == 1 else [run, endless]).split()
    status, _, err = call(capsys, *words)
    option = {"asm {}": "name", "report {}": "json"}.get(form, "--device")
    assert (status, err) == (
        2,
        f"octavo: error: {option}: {endless} has more than 67108864 characters\n",
    )


def test_a_failing_disassembler_is_not_taken_for_an_unreadable_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "mine.cu"
    source.write_text('extern "C" __global__ void mine(float* p) { p[threadIdx.x] *= 2.0f; }\n')
    broken = tmp_path / "nvdisasm"
    broken.write_bytes(b"\0")
    broken.chmod(0o755)
    monkeypatch.setattr("octavo.inspect.sass.find_tool", lambda name: broken)
    status, _, err = call(capsys, "asm", str(source))
    assert status == 2
    assert "nvdisasm" in err
    assert "mine.cu" not in err


def test_pages_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    """Nothing of ours is read or written in the locale's encoding."""
    run, mine = tmp_path / "run.json", tmp_path / "mine.cu"
    text = json.dumps(document() | {"remark": "\u00b5"}, ensure_ascii=False)
    run.write_text(text, "utf-8")
    kernel = 'extern "C" __global__ void mine(float* p) { p[threadIdx.x] = 2; }  // \u00b5\n'
    mine.write_text(kernel, "utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    warn = {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONWARNINGS": "default::EncodingWarning"}
    settings = {"cwd": tmp_path, "env": os.environ | locale | warn, "timeout": 120}
    for words in (
        ["asm", "mine.cu", "--html", "a.html"],
        ["report", "run.json", "--out", "b.html"],
    ):
        command = [sys.executable, "-m", "octavo", "kernels", *words]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, **settings)
        assert done.returncode == 0, done.stderr
        assert str(Path(octavo.__file__).parent) not in done.stderr
        page = (tmp_path / words[-1]).read_text("utf-8")
        assert page.endswith("</html>")
        assert not page.isascii()


@pytest.mark.parametrize("name", ["99", "no_such_rung"])
def test_an_unknown_rung_is_one_line(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, _, err = call(capsys, "asm", name)
    assert status == 2
    assert err.startswith("octavo: error: no rung")
    assert err.count("\n") == 1


def test_roofline_by_hand(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "roof.svg"
    status, out, _ = call(capsys, "roofline", "8192", "8192", "8192", "--svg", str(picture))
    assert "8192 x 8192 x 8192" in picture.read_text()
    assert status == 0
    assert "2730.7 FLOP/byte" in out
    assert "bound by    compute" in out
    assert "2048 tiles" in out
    _, out, _ = call(capsys, "roofline", "1", "4096", "4096", "--clock", "1500")
    assert "bound by    memory" in out


@pytest.mark.parametrize("bad", ["0", "9" * 400])
@pytest.mark.parametrize(
    ("name", "template"),
    [("m", "{} 1 1"), ("--clock", "1 1 1 --clock {}"), ("--tile", "1 1 1 --tile {} 1")],
)
def test_roofline_refuses_numbers_by_name(
    capsys: pytest.CaptureFixture[str], name: str, template: str, bad: str
) -> None:
    with pytest.raises(SystemExit):
        main(["kernels", "roofline", *template.format(bad).split()])
    assert f"argument {name}: must be from 1 to 2147483647" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "least"),
    [
        ("bench --sizes 0", 1),
        ("bench --sizes 64 -1", 1),
        ("bench --fp32-sizes 99999999999", 1),
        ("bench --rounds 0", 1),
        ("occupancy --smem -1", 0),
    ],
)
def test_numbers_of_the_lab_are_bounded_by_name(
    capsys: pytest.CaptureFixture[str], words: str, least: int
) -> None:
    with pytest.raises(SystemExit):
        main(["kernels", *words.split()])
    option = words.split()[1]
    assert f"argument {option}: must be from {least} to 2147483647" in capsys.readouterr().err


@pytest.mark.parametrize("numbers", ["--threads 64 --registers 255", "--smem 0"])
def test_a_rung_is_not_given_together_with_numbers(
    capsys: pytest.CaptureFixture[str], numbers: str
) -> None:
    status, out, err = call(capsys, "occupancy", "02", *numbers.split())
    assert (status, out) == (2, "")
    assert "a rung has its own --threads, --registers and --smem" in err


def test_occupancy_of_numbers_and_of_a_rung(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "occupancy", "--threads", "1024", "--registers", "33")
    assert status == 0
    assert "50% occupancy" in out
    status, out, _ = call(capsys, "occupancy", "02_naive")
    assert (status, "100% occupancy" in out) == (0, True)
    status, _, err = call(capsys, "occupancy")
    assert (status, "--threads" in err) == (2, True)
    status, _, err = call(capsys, "occupancy", "--threads", "1024", "--registers", "128")
    assert (status, "do not fit" in err) == (2, True)


def test_report_links_the_asm_pages_that_it_wrote(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run.json"
    run.write_text(json.dumps(document()))
    out = tmp_path / "site" / "index.html"
    status, _, _ = call(capsys, "report", str(run), "--out", str(out), "--asm", "02")
    assert status == 0
    assert 'href="asm/02_naive.html"' in out.read_text()
    assert "FFMA" in (tmp_path / "site" / "asm" / "02_naive.html").read_text()


def test_report_needs_something_to_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, _, err = call(capsys, "report")
    assert (status, "--figures" in err) == (2, True)
    status, _, _ = call(capsys, "report", "--figures", str(tmp_path))
    assert status == 0
    names = {path.name for path in tmp_path.glob("*.svg")}
    kinds = ("swizzle", "ring", "schedules", "quantization", "occupancy", "roofline")
    assert names == {f"{kind}.svg" for kind in kinds}


def test_only_pictures_need_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = tmp_path / "a.html"
    assert call(capsys, "asm", "02", "--html", str(page))[0] == 0
    assert "FFMA" in page.read_text()
    status, _, err = call(capsys, "report", "--figures", str(tmp_path))
    assert (status, err.count("\n")) == (2, 1)
    assert "pip install -e '.[kernels]'" in err
