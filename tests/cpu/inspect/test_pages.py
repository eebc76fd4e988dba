"""Pages and pictures: well formed, self-contained, and showing what the data says."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError, KernelError
from octavo.inspect.asm_views import render_html
from octavo.inspect.figures import ladder_figure, pictures, ring_figure, roofline_figure
from octavo.inspect.notes import notes
from octavo.inspect.page import PALETTE, canvas, style, svg, tip
from octavo.inspect.report import render_report
from octavo.inspect.report_data import (
    device_text,
    load_device,
    load_run,
    parse_run,
    requested_intensity,
)
from octavo.kernels.matmul.registry import RUNGS, rung
from octavo.kernels.matmul.roofline import Roofline
from tests.cpu.inspect.listings import LOOP_SASS, LOOP_SOURCE, listing

VOID = {"meta", "br", "hr", "img", "input", "link"}
# Attributes by which a page could reach out of itself.
REACH = {"src", "srcset", "data", "action", "poster", "background"}


class Checker(HTMLParser):
    """Fails on unbalanced tags and on anything that would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.links: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        names = dict(attrs)
        assert not REACH & names.keys(), f"<{tag}> loads {names}"
        assert tag not in ("link", "iframe", "object", "embed")
        self.links += [names["href"] or ""] if "href" in names else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    inside = html.replace("http://www.w3.org/2000/svg", "").replace("url(#", "")
    for outside in ("http://", "https://", "@import", "url("):
        assert outside not in inside
    return checker


def result(
    name: str, dtype: str, size: int, mode: str, tflops: float, ref: float
) -> dict[str, Any]:
    micros = 2 * size**3 / tflops / 1e6
    return {
        "rung": name,
        "dtype": dtype,
        "m": size,
        "n": size,
        "k": size,
        "mode": mode,
        "median_us": micros,
        "low_us": micros * 0.99,
        "high_us": micros * 1.02,
        "tflops": tflops,
        "vs_cublas": tflops / ref,
        "ok": True,
    }


def document() -> dict[str, Any]:
    """A run in the harness's form, with made-up speeds."""
    results = []
    for dtype, reference, modes in (
        ("fp32", 50.0, ["sustained"]),
        ("bf16", 780.0, ["cool", "sustained"]),
    ):
        chosen = [r for r in RUNGS if r.dtype == dtype and r.kind == "matmul"]
        for mode in modes:
            for place, one in enumerate(chosen, 1):
                speed = reference * 1.05 * place / len(chosen)
                results.append(result(one.name, dtype, 4096, mode, speed, reference))
            results.append(result("cublas", dtype, 4096, mode, reference, reference))
        results[-1]["clocks"] = {"sm_mhz_median": 1600, "watts_max": 690.0}
    ilp = {
        "rung": "00_ilp",
        "tflops": {"ilp_dependent": 15.0, "ilp_independent": 57.0},
        "ratio": 3.8,
    }
    return {"environment": {"gpu": "NVIDIA H200", "sms": 132}, "results": results, "ilp": [ilp]}


def device_document() -> dict[str, Any]:
    """A device measurement in the harness's form, with made-up numbers."""
    return {
        "environment": {"gpu": "NVIDIA H200", "driver": "580"},
        "sizes": {
            "sms": 132,
            "registers_per_sm": 65536,
            "smem_bytes_per_sm": 233472,
            "l2_bytes": 60 * 2**20,
            "memory_bytes": 140 * 2**30,
        },
        "bandwidth_gbs": {"copy": 4100.0, "read": 4390.0, "l2_read": 7200.0, "smem_read": 29e3},
        "strided_read": {
            str(s): {"useful": 4300.0 / min(s, 8), "moved": 4300.0} for s in (1, 2, 4, 8, 16, 32)
        },
        "latency_cycles": {"smem": 29, "dsmem": 210, "l1": 38, "l2": 263, "dram": 680},
        "smem_cycles_per_load": {"broadcast": 1.0, "1": 1.0, "2": 2.0, "32": 32.0},
        "tensor_core": {
            "random": {"tflops": 720.0, "sm_mhz_median": 1500, "watts_max": 700.0},
            "zeros": {"tflops": 890.0, "sm_mhz_median": None, "watts_max": None},
        },
    }


def test_a_device_measurement_is_shown_as_text_and_in_the_report() -> None:
    made = device_document()
    text = device_text(made)
    assert re.search(r"^L2 cache +60\.0 MB +263 +7\.20 ", text, re.MULTILINE)
    assert re.search(r"^ +stride +8 +538 +4300$", text, re.MULTILINE)
    # 132 SMs x 4096 FLOP a clock x 1500 MHz = 811 TFLOP/s.
    assert "random inputs: 720 TFLOP/s at 1500 MHz, 89% of the 811 possible there" in text
    assert "all-zero inputs: 890 TFLOP/s\n" in text
    html = render_report(parse_run(document()), device=made)
    words = "".join(checked(html).words)
    assert "distributed shared memory" in words
    assert "L2 by ordinary loads, 7.2 TB/s" in words


def test_a_ladder_file_is_no_device_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(device_document()))
    assert load_device(path)["sizes"]["sms"] == 132
    path.write_text(json.dumps(document()))
    with pytest.raises(KernelError, match="octavo kernels device"):
        load_device(path)
    for broken in ("[]", json.dumps(device_document() | {"strided_read": {"1": {}}})):
        path.write_text(broken)
        with pytest.raises(KernelError, match="octavo kernels device"):
            load_device(path)


def test_the_asm_page_is_well_formed_and_links_three_panes() -> None:
    assembly = listing(LOOP_SASS, LOOP_SOURCE)
    html = render_html(assembly, notes(assembly), title="a < b", intro="x & y")
    found = checked(html)
    words = "".join(found.words)
    assert "a < b" in words
    assert "Redundant zero-init." in words
    assert html.count("data-o=") == len(assembly.sass.instructions)
    assert '"FFMA": "fp32 fused multiply-add' in html
    # The source line of the loop body and its instructions carry the same number.
    assert html.count('data-s="2"') == 1 + sum(
        assembly.home_line(s) == 2 for s in assembly.sass.instructions
    )


def words_of(text: str) -> list[str]:
    """What is written in an SVG picture, in order."""
    return [t.text or "" for t in ElementTree.fromstring(text).iter() if t.tag.endswith("}text")]


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return {name: svg(figure) for name, figure in pictures().items()}


def test_each_picture_is_a_valid_svg_of_its_own(drawn: dict[str, str]) -> None:
    for name, text in drawn.items():
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg")
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for shape in root.iter():
            for axis, limit in (("x", width), ("y", height)):
                if axis in shape.attrib:
                    assert -1 <= float(shape.attrib[axis]) <= limit + 1, (name, shape.attrib)
        assert "nan" not in text.lower()
        assert "var(--" not in text


def test_the_swizzle_picture_says_what_the_twin_computes(drawn: dict[str, str]) -> None:
    text = drawn["swizzle"]
    assert text.count("1 pass: no conflict") == 3
    assert text.count("8 passes: 8-way bank conflict") == 1
    assert "<title>row 1, chunk 0: byte 128 lies at 144</title>" in text


def test_committed_figures_are_up_to_date(drawn: dict[str, str]) -> None:
    """docs/figures is written by `octavo kernels report --figures docs/figures`.

    Another matplotlib may lay out a little differently: compared are the words and where they stand.
    """
    folder = Path(__file__).resolve().parents[3] / "docs" / "figures"
    for name, text in drawn.items():
        committed = (folder / f"{name}.svg").read_text()
        assert words_of(committed) == words_of(text), name
        for old, new in zip(places_of(committed), places_of(text), strict=True):
            assert old == pytest.approx(new, abs=5), name


def places_of(text: str) -> list[float]:
    texts = [t for t in ElementTree.fromstring(text).iter() if t.tag.endswith("}text")]
    return [float(t.attrib[axis]) for t in texts for axis in "xy" if axis in t.attrib]


def test_a_picture_follows_the_theme_escapes_words_and_shows_tips() -> None:
    with style():
        figure, axes = canvas(100, 100, "A", 'a<b & "c"')
        axes["A"].plot([0], [0], "o", color=PALETTE["c0"], gid=tip("<x>"))
        axes["A"].set_title("<&>")
    text = svg(figure, themed=True)
    titles = [t.text for t in ElementTree.fromstring(text).iter() if t.tag.endswith("}title")]
    assert titles == ['a<b & "c"', "<x>"]
    assert "<&>" in words_of(text)
    assert "fill: var(--c0)" in text
    assert not any(colour in text for colour in PALETTE.values())


def test_the_same_picture_twice_is_the_same_text(drawn: dict[str, str]) -> None:
    assert svg(ring_figure()) == drawn["ring"]


def test_roofline_labels_do_not_cover_each_other() -> None:
    points = [(85.0, 700.0 + n, f"r{n}", PALETTE["c0"]) for n in range(6)]
    roofs = [("p", "", Roofline(989e12, 4.8e12), PALETTE["c1"])]
    root = ElementTree.fromstring(svg(roofline_figure(roofs, points, "six")))
    labels = [t for t in root.iter() if re.fullmatch(r"r\d", t.text or "")]
    places = sorted(float(t.attrib["y"]) for t in labels)
    assert len(places) == 6
    assert all(b - a >= 11 for a, b in itertools.pairwise(places))


def test_longer_bars_are_faster() -> None:
    (group,) = [g for g in parse_run(document()).groups if g.dtype == "fp32"]
    figure = ladder_figure(group, {"cuBLAS": 50.0}, PALETTE["c0"])
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == [row.tflops for row in group.rungs]
    assert widths == sorted(widths)
    assert "cuBLAS: 50" in words_of(svg(figure))


def test_the_report_shows_every_rung_and_the_best_speed(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document()))
    assembly = listing(LOOP_SASS, LOOP_SOURCE)
    html = render_report(
        load_run(path),
        assemblies={"02_naive": (assembly, notes(assembly))},
        asm_links={"02_naive": "asm/02_naive.html"},
    )
    found = checked(html)
    words = "".join(found.words)
    for one in RUNGS:
        if one.kind == "matmul":
            assert one.name in words
            assert one.header["Idea"] in words
    assert "819" in words  # 1.05 x 780, the best bf16 rung
    assert "1.050 x cuBLAS" in words
    assert "3.8 times" in words
    assert "asm/02_naive.html" in found.links
    assert all(link.startswith(("#", "asm/")) for link in found.links)
    assert found.counts["svg"] == 3 + 1 + len(pictures()) - 1


def test_a_wrong_rung_is_said_to_be_wrong_and_is_never_the_best() -> None:
    made = document()
    last = max(r["rung"] for r in made["results"] if r["dtype"] == "bf16" and r["rung"] != "cublas")
    for row in made["results"]:
        if row["rung"] == last:
            row["ok"] = False
    run = parse_run(made)
    html = render_report(run)
    checked(html)
    assert f"do not count: {last}" in html
    assert all(g.best is None or g.best.rung != last for g in run.groups)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["results"].clear(), "no results"),
        (lambda d: d["results"][0].update(tflops=math.nan), "tflops = nan"),
        (lambda d: d["results"][0].update(median_us=0), "median_us = 0"),
        (lambda d: d["results"][0].pop("vs_cublas"), "vs_cublas"),
        (lambda d: d.pop("results"), "results"),
        (lambda d: d["results"][0].update(m=-1), "size"),
        (lambda d: d["results"][0].update(dtype="fp64"), "fp64"),
        (lambda d: d["results"][0].update(rung="99_none"), "99_none"),
    ],
)
def test_a_damaged_results_file_is_an_error(tmp_path: Path, change: Any, message: str) -> None:
    made = copy.deepcopy(document())
    change(made)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(made))
    with pytest.raises(KernelError, match=message):
        load_run(path)


def test_files_that_are_no_json_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="json: cannot read"):
        load_run(tmp_path / "absent.json")
    (tmp_path / "x.json").write_bytes(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"x\.json is not text"):
        load_run(tmp_path / "x.json")
    for text in ("{", "[" * 100_000):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(KernelError, match="is not JSON"):
            load_run(tmp_path / "x.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(KernelError, match="not the result"):
        load_run(tmp_path / "list.json")


def test_what_a_rung_asks_of_memory_grows_with_its_tile_and_cluster() -> None:
    assert requested_intensity(rung("02_naive")) == 0.25
    assert requested_intensity(rung("09_tma_wgmma")) == 32
    plain, shared = rung("14_minimal_arrivals"), rung("15_cluster_multicast")
    assert requested_intensity(plain) == pytest.approx(128 * 256 / (128 + 256))
    assert requested_intensity(shared) == pytest.approx(256 * 256 / (256 + 256))


def test_the_committed_report_shows_the_committed_results() -> None:
    """docs/report is made of benchmarks/results/ladder-h200.json; its docs name the command."""
    root = Path(__file__).resolve().parents[3]
    run = load_run(root / "benchmarks" / "results" / "ladder-h200.json")
    page = (root / "docs" / "report" / "ladder-h200.html").read_text()
    found = checked(page)
    words = "".join(found.words)
    for group in run.groups:
        for row in group.rungs:
            assert f"{row.tflops:.1f} · {row.vs_cublas:.2f}x" in words, (group.name, row.rung)
    for link in found.links:
        assert link.startswith("#") or (root / "docs" / "report" / link).is_file()
