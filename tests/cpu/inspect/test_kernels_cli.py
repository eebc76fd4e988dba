"""`octavo kernels` as a user calls it, on a machine without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

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
        assert one.idea in out


@pytest.mark.parametrize("action", ["bench", "device"])
def test_measuring_says_in_one_line_that_it_needs_a_gpu(
    action: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, out, err = call(capsys, action)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "needs a CUDA GPU" in err


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
    assert (status, f"cannot read {source}: 'utf-8'" in err) == (2, True)
    source.write_text("this is no kernel\n")
    status, _, err = call(capsys, "asm", str(source))
    assert (status, "does not compile" in err) == (2, True)


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
    assert "install octavo[kernels]" in err
