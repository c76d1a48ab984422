"""The page to choose a wheel on, in a real browser. test_which.py tests its choices without a browser."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tools
import wheelhouse
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import universal
from rocm_wheels.publish import directory, index
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.publish.home import Home
from rocm_wheels.publish.links import Wheel

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REPOSITORY = "https://github.com/owner/name"
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
TARGETS = {"ck": ("gfx90a", "gfx942"), "triton": ("gfx90a", "gfx942", "gfx1100")}
HOSTILE = '"><img src=x onerror=alert(1)>`|</script>'


@dataclass(frozen=True)
class Sites:
    """Addresses of a site with wheels and of a site without wheels, and the wheels."""

    full: str
    empty: str
    wheels: list[Wheel]


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    dist, root = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("www")
    for flash_attn in ("2.7.4", "2.8.3"):
        for python in ("3.10", "3.12"):
            for torch, rocm in (("2.5.1", "6.2"), ("2.6.0", "6.1"), ("2.10.0", "7.1")):
                for backend, targets in TARGETS.items():
                    made_for = wheelhouse.cell(f"{flash_attn} {python} {torch} {rocm}", backend)
                    device = wheelhouse.MI300X if backend == "ck" else None
                    wheelhouse.write(dist, made_for, targets=targets, device=device)
    wheels = [
        replace(wheel, yanked=HOSTILE) if wheel.version == "2.8.3+rocm71torch2.10" else wheel
        for wheel in directory.read(dist).wheels
    ]
    handler = functools.partial(_Handler, directory=root)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        for name, content in (("full", wheels), ("empty", [])):
            home = Home(url=f"{url}{name}/", repository=REPOSITORY)
            index.build(Catalogue(wheels=tuple(content)), root / name, versions=versions.load(), home=home)
        yield Sites(full=f"{url}full/", empty=f"{url}empty/", wheels=wheels)
        server.shutdown()


@pytest.fixture(scope="module", autouse=True)
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        tools.missing("no Chromium on this machine: apt-get install chromium")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield started
        started.close()


class Visit:
    """An open page that must not send requests to other hosts or write to the console."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": DESKTOP, **options})
        self.context.set_default_timeout(10_000)
        self.page: Page = self.context.new_page()
        self.console: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def __enter__(self) -> Page:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert self.console == []
        assert {url for url in self.requests if not url.startswith("data:")} == {self.requests[0]}


def shown(page: Page) -> list[str]:
    return page.locator("#wheels tbody tr:visible th a").all_inner_texts()


def opened(page: Page) -> Page:
    """The page with the list of wheels unfolded."""
    page.locator("#list summary").click()
    return page


def paste(page: Page, text: str) -> Locator:
    page.locator("#paste").fill(text)
    return page.locator("#answer")


def test_without_a_choice_all_is_listed(browser: Browser, sites: Sites) -> None:
    with Visit(browser, sites.full) as page:
        expect(page.locator("#wheels")).to_be_hidden()
        assert shown(opened(page)) == [wheel.version for wheel in sites.wheels]
        expect(page.locator("#count")).to_have_text("24 of 24")
        expect(page.get_by_label("flash-attn").locator("option:checked")).to_have_text("any, newest first")
        page.get_by_label("flash-attn").select_option(label="2.8.3")
        expect(page.locator("#count")).to_have_text("12 of 24")


@pytest.mark.parametrize(
    ("label", "value", "matches"),
    [
        ("torch", "2.10", lambda wheel: wheel.torch == "2.10"),
        pytest.param("Python", "3.12", lambda wheel: wheel.python == "3.12", marks=pytest.mark.long),
        pytest.param("ROCm of torch", "6.1", lambda wheel: wheel.rocm == "6.1", marks=pytest.mark.long),
        ("GPU", "gfx1100", lambda wheel: "gfx1100" in wheel.targets),
        pytest.param("Backend", "ck", lambda wheel: wheel.backend == "ck", marks=pytest.mark.long),
        pytest.param("flash-attn", "2.7.4", lambda wheel: wheel.flash_attn == "2.7.4", marks=pytest.mark.long),
        ("torch", "2.14", lambda wheel: wheel.torch == "2.14"),
    ],
)
def test_every_filter(browser: Browser, sites: Sites, label: str, value: str, matches: Any) -> None:
    with Visit(browser, sites.full) as page:
        opened(page).get_by_label(label, exact=True).select_option(value)
        expected = [wheel.version for wheel in sites.wheels if matches(wheel)]
        assert shown(page) == expected
        expect(page.locator("#count")).to_have_text(f"{len(expected)} of 24")
        expect(page.locator(".table")).to_be_visible(visible=bool(expected))
        page.get_by_role("button", name="Clear").click()
        assert len(shown(page)) == 24
        expect(page.get_by_label("Python", exact=True)).to_be_focused()


def test_pasting_gives_the_line_and_copy_copies_it(browser: Browser, sites: Sites) -> None:
    with Visit(browser, sites.full, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.get_by_label("Run this where you use torch").fill("python=3.12.1 torch=2.5.1+rocm6.2 hip=6.2.4 gpu=gfx942")
        line = f'pip install "flash_attn==2.8.3+rocm62torch2.5" --extra-index-url {sites.full}rocm6.2/torch2.5/simple/'
        lines = page.locator("#answer code").all_inner_texts()
        assert lines[:2] == [line, "python3 -m flash_attn.doctor"]
        assert lines[2].startswith('python3 -c "import torch, flash_attn;')
        expect(page.locator("#answer")).to_contain_text("Passed its tests on AMD Instinct MI300X (gfx942)")
        page.get_by_role("button", name="Copy the pip line").click()
        expect(page.locator("#status")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == line
        page.get_by_role("button", name="Copy the command").click()
        assert page.evaluate("navigator.clipboard.readText()").startswith('python -c "import platform, sysconfig')
        assert page.url.endswith("#python=3.12&torch=2.5&rocm=6.2&gpu=gfx942&platform=linux")
        page.get_by_label("Backend").select_option("triton")
        expect(page.locator("#answer code").first).to_contain_text("2.8.3+rocm62torch2.5triton")
        expect(page.locator("#answer")).to_contain_text("not run on an AMD GPU")


def test_a_refused_clipboard_selects_the_line(browser: Browser, sites: Sites) -> None:
    with Visit(browser, f"{sites.full}#python=3.12&torch=2.5&rocm=6.2") as page:
        page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
        page.get_by_role("button", name="Copy the pip line").click()
        expect(page.locator("#status")).to_have_text("Press Ctrl+C")
        assert "flash_attn==2.8.3+rocm62torch2.5" in page.evaluate("getSelection().toString()")


def test_text_without_versions_is_told(browser: Browser, sites: Sites) -> None:
    with Visit(browser, sites.full) as page:
        paste(page, "hello")
        expect(page.locator("#pasted")).to_contain_text("There is no Python or torch version in this text.")
        paste(page, "")
        expect(page.locator("#pasted")).to_be_empty()


NEWEST = "torch==2.14.1+rocm7.2"


# What is pasted, the state of the answer, and what it says; the job of the long tests pastes all.
ANSWERS = [
    ("system=Linux python=3.9.1 torch=2.5.1+rocm6.2 hip=6.2.4 gpu=gfx1100", "missing", "for Python 3.10 and newer"),
    ("python=3.11.1 torch=2.4.1+rocm6.1 hip=6.1.4 gpu=gfx1100", "torch", NEWEST),
    ("python=3.11.1 torch=2.5.1+rocm5.7 hip=5.7.1 gpu=gfx1100", "torch", "for ROCm 6.1 and newer"),
    (
        "python=3.11.7 torch=2.5.1+rocm6.2 hip=6.2.4 gpu=gfx1201",
        "torch",
        "gfx1201 needs torch for ROCm 6.4 or newer",
    ),
    ("python=3.11.7 torch=2.8.0+rocm6.4 hip=6.4.1 gpu=gfx1151", "torch", "no kernels for gfx1151 before ROCm 7.0"),
    ("python=3.11.7 torch=2.5.1+rocm6.2 hip=6.2.4 gpu=gfx1103", "found", "export HSA_OVERRIDE_GFX_VERSION=11.0.0"),
    ("python=3.11.7 torch=2.13.0+rocm7.2 hip=7.2.1 gpu=gfx1103", "found", 'is better: pip install "torch==2.14.1'),
    ("python=3.12.3 torch=2.13.0+rocm7.2 hip=7.2.1 gpu=gfx1010", "torch", '"torch[device-gfx1010]" --index-url'),
    ("python=3.12.3 torch=2.12.0+rocm7.14.0 hip=7.14.1 gpu=gfx1010", "found", "flash_attn==2.8.3+rocm"),
    (
        "python=3.12.3 torch=2.13.0+rocm7.2 hip=7.2.1 gpu=gfx1036,gfx1201",
        "found",
        "instead, HIP_VISIBLE_DEVICES",
    ),
    ("python=3.14.0t torch=2.14.1+rocm7.2 hip=7.2.1 gpu=gfx1201", "missing", "3.14t. Use Python 3.14."),
    ("python=3.12.1 torch=2.16.0+rocm10.2 hip=10.2.1 gpu=gfx942", "found", "This torch is newer than 2.15"),
    ("python=3.12.1 torch=2.5.1+rocm6.2 hip=6.2.4 gpu=gfx906", "missing", "No wheel has kernels for gfx906."),
    ("python=3.12.1 torch=2.6.0+cu124 hip=None gpu=NVIDIA H200", "torch", "This torch is not built for ROCm."),
    ("torch              2.9.1+rocmsdk20260116", "", "does not say torch's ROCm: choose it"),
    ("system=Darwin python=3.12.3 torch=2.13.0 hip=None gpu=", "missing", "for Linux and Windows on x86_64"),
    (
        "system=Windows python=3.12.3 torch=2.13.0+rocm10.0.0 hip=10.0 gpu=gfx942",
        "missing",
        "does not serve gfx942",
    ),
    ("system=Windows python=3.12.3 torch=2.13.0+cpu hip=None gpu=", "torch", 'pip install "torch[device-all]"'),
    ("system=Windows python=3.12.3 torch=2.13.0+rocm10.0.0 hip=10.0 gpu=gfx1103", "found", "python -m pip"),
]


@pytest.mark.parametrize(
    ("pasted", "state", "said"),
    [pytest.param(*each, marks=pytest.mark.long if place % 5 else ()) for place, each in enumerate(ANSWERS)],
)
def test_answers(browser: Browser, both: str, pasted: str, state: str, said: str) -> None:
    """A sample of test_advice.py, in a browser."""
    with Visit(browser, both, user_agent=LINUX) as page:
        answer = paste(page, pasted)
        expect(answer).to_have_attribute("data-state", state)
        expect(answer).to_contain_text(said)
        text = answer.inner_text()
        if not any(text in pasted for text in ("hip=None", "+rocm7.14.0", "+rocm10", "rocmsdk")):
            page.reload()  # the address holds the choice
            assert page.locator("#answer").inner_text() == text


def test_a_new_user_gets_torch_then_the_wheel(browser: Browser, both: str) -> None:
    with Visit(browser, both, user_agent=LINUX, viewport=PHONE) as page:
        page.get_by_label("GPU", exact=True).select_option(label="RX 9070 XT (gfx1201)")
        lines = page.locator("#answer code").all_inner_texts()
        assert lines[0] == f'pip install "{NEWEST}" --index-url https://download.pytorch.org/whl/rocm7.2'
        assert lines[1].startswith('pip install "flash_attn==2.8.3+rocm"')
        assert "not run on an AMD GPU" in page.locator("#answer .verdict").inner_text()
        assert page.evaluate("document.documentElement.scrollHeight") < 3000


def test_a_wheel_that_is_missing_gets_the_build_and_the_form(browser: Browser, sites: Sites) -> None:
    with Visit(browser, f"{sites.full}#python=3.11&torch=2.5&rocm=6.2&gpu=gfx1100") as page:
        answer = page.locator("#answer")
        expect(answer).to_contain_text("No such wheel yet")
        expect(answer).to_contain_text(f'PYTORCH_ROCM_ARCH="gfx1100" ./build_rocm.sh {wheelhouse.NEWEST}')
        form = f"{REPOSITORY}/issues/new?template=request_wheel.yml&python=3.11&torch=2.5&rocm=6.2&gpu=gfx1100"
        expect(answer.get_by_role("link", name="ask for it")).to_have_attribute("href", form)


def test_yanked_wheels_are_marked_and_not_offered(browser: Browser, sites: Sites) -> None:
    with Visit(browser, f"{sites.full}#python=3.12&torch=2.10&rocm=7.1") as page:
        expect(page.locator("#answer code").first).to_contain_text("2.8.3+rocm71torch2.10triton")
        yanked = opened(page).locator("tr[data-yanked]:visible")
        expect(yanked).to_have_count(1)
        expect(yanked).to_contain_text(f"yanked: {HOSTILE}")
        expect(page.locator("img")).to_have_count(0)
        page.get_by_label("Backend").select_option("ck")
        page.get_by_label("flash-attn").select_option("2.8.3")
        expect(page.locator("#answer h3")).to_have_text(f"Withdrawn: {HOSTILE}")


def test_without_javascript_the_page_is_a_table(browser: Browser, sites: Sites) -> None:
    with Visit(browser, sites.full, java_script_enabled=False) as page:
        expect(page.locator("#wheels tbody tr")).to_have_count(24)
        expect(page.locator("#wheels tbody tr").first).to_be_visible()
        expect(page.locator("#find")).to_be_hidden()
        expect(page.get_by_text("A wheel for one combination installs from an index of its own")).to_be_visible()


def test_with_the_keyboard_alone(browser: Browser, sites: Sites) -> None:
    with Visit(browser, sites.full) as page:
        page.locator("#paste").focus()
        page.keyboard.press("Tab")  # the system, which the browser names
        page.keyboard.press("Tab")  # the GPU
        for choice in ("3.12", "2.5", "6.2"):
            page.keyboard.press("Tab")
            page.keyboard.type(choice)
        expect(page.locator("#answer code").first).to_contain_text("2.8.3+rocm62torch2.5")
        for _ in range(4):  # backend, flash-attn, Clear, Copy
            page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Copy the pip line")).to_be_focused()
        unnamed = (
            "[...document.querySelectorAll('select, textarea')].filter((control) => !control.labels.length).length"
        )
        assert page.evaluate(unnamed) == 0


def test_before_the_first_release(browser: Browser, sites: Sites) -> None:
    with Visit(browser, f"{sites.empty}#python=3.12&torch=2.5&rocm=6.2") as page:
        expect(page.locator("#none")).to_contain_text("No wheel is published yet.")
        expect(page.locator("#answer")).to_contain_text(f"./build_rocm.sh {wheelhouse.NEWEST}")
        expect(page.get_by_role("link", name="ask for it")).to_be_visible()


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESKTOP, "light")], ids=["phone", "desktop"])
def test_fits_and_reads_on_every_screen(browser: Browser, sites: Sites, size: Mapping[str, int], scheme: str) -> None:
    """Nothing overflows the edge, and text has the contrast of WCAG AA, 4.5 to 1."""
    url = f"{sites.full}#python=3.11&torch=2.5&rocm=6.2"
    with Visit(browser, url, viewport=size, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
        for place in (
            "body",
            "header p",
            "header a",
            "#answer p",
            "#answer code",
            "label",
            "td:nth-child(6)",
            "footer p",
        ):
            colors = page.locator(place).first.evaluate(COLORS)
            assert contrast(*map(rgb, colors)) >= 4.5, (place, colors)


# The width of a choice's text and its arrow in pixels.
WIDTH = """element => {
  const ruler = document.createElement("canvas").getContext("2d");
  ruler.font = getComputedStyle(element).font;
  return ruler.measureText(element.selectedOptions[0].text).width + 40;
}"""
# The colours of an element's text and background.
COLORS = """element => {
  let ground = element;
  while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
  return [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor];
}"""


def rgb(color: str) -> tuple[float, ...]:
    return tuple(int(part) / 255 for part in re.findall(r"\d+", color)[:3])


def contrast(text: tuple[float, ...], ground: tuple[float, ...]) -> float:
    """The contrast ratio of WCAG 2.2."""

    def luminance(color: tuple[float, ...]) -> float:
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(text), luminance(ground)))
    return (light + 0.05) / (dark + 0.05)


def test_two_thousand_wheels(browser: Browser, sites: Sites, tmp_path: Path) -> None:
    """The page of a large project filters all of them and stays below 2 MB."""
    many = [replace(wheel, name=f"{wheel.name}-{copy}") for copy in range(84) for wheel in sites.wheels]
    home = Home(url="https://example.org/", repository=REPOSITORY)
    page_file = tmp_path / "index.html"
    page_file.write_text(index.chooser(many, versions=versions.load(), home=home), encoding="utf-8")
    assert page_file.stat().st_size < 2_000_000
    with Visit(browser, page_file.as_uri()) as page:
        page.get_by_label("Python", exact=True).select_option("3.12")
        expect(page.locator("#count")).to_have_text("1008 of 2016")


WINDOWS = "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 Chrome/140 Safari/537.36"
LINUX = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/140 Safari/537.36"
ANDROID = "Mozilla/5.0 (Linux; Android 15; Pixel 9) AppleWebKit/537.36 Chrome/140 Mobile Safari/537.36"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a release with universal wheels for both systems, of which 2.7.4 for Linux is withdrawn."""
    dist = tmp_path_factory.mktemp("both")
    data = versions.load()
    for flash_attn in ("2.7.4", "2.8.3"):
        for platform in (wheelhouse.PLATFORM, "win_amd64"):
            radeons = ("gfx10-1-generic", "gfx1100", "gfx11-generic", "gfx12-generic")
            targets = radeons if platform == "win_amd64" else ("gfx942", *radeons)
            wheelhouse.write(dist, universal(data, flash_attn), platform=platform, targets=targets)
    wheels = [
        replace(wheel, yanked="dQ is wrong", listed=False)
        if (wheel.platform, wheel.flash_attn) == ("linux", "2.7.4")
        else wheel
        for wheel in directory.read(dist).wheels
    ]
    page = dist / "index.html"
    home = Home(url="https://example.org/", repository=REPOSITORY)
    page.write_text(index.chooser(wheels, versions=data, home=home), encoding="utf-8")
    return page.as_uri()


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize(
    ("agent", "gpu", "line", "backend"),
    [
        (WINDOWS, "RX 9070 (gfx1201)", "python -m pip install ", "triton"),
        (LINUX, "RX 7900 XTX (gfx1100)", "pip install ", "ck"),
    ],
)
def test_each_system_gets_its_own_line(
    browser: Browser, both: str, size: Mapping[str, int], agent: str, gpu: str, line: str, backend: str
) -> None:
    with Visit(browser, both, user_agent=agent, viewport=size) as page:
        choice = page.get_by_label("GPU", exact=True)
        choice.select_option(label=gpu)
        code = page.locator("#answer code").filter(has_text="flash_attn==")
        expect(code).to_have_text(f'{line}"flash_attn==2.8.3+rocm" --extra-index-url https://example.org/simple/')
        expect(page.locator("#answer .verdict")).to_contain_text(f"every ROCm, {backend}, flash-attn 2.8.3")
        assert choice.evaluate(WIDTH) < choice.evaluate("element => element.clientWidth"), "the whole name is shown"
        for command in page.locator(".command").all():
            assert command.evaluate("element => element.scrollWidth <= element.clientWidth")
        if size == PHONE:
            cut = "element => element.scrollWidth > element.clientWidth"
            assert not [text for text in page.locator("code:visible").all() if text.evaluate(cut)], "no command is cut"


def test_the_wheel_of_another_system_answers_for_no_withdrawn_wheel(browser: Browser, both: str) -> None:
    for agent, heading in ((LINUX, "Withdrawn: dQ is wrong"), (WINDOWS, "One wheel for your torch")):
        chosen = "python=3.12&torch=2.12&rocm=7.2&flash_attn=2.7.4"
        with Visit(browser, f"{both}#{chosen}", user_agent=agent) as page:
            expect(page.locator("#answer h3")).to_have_text(heading)


def test_an_unknown_system_is_asked_for(browser: Browser, both: str) -> None:
    with Visit(browser, f"{both}#gpu=gfx942", user_agent=ANDROID, viewport=PHONE) as page:
        expect(page.locator("#answer")).to_have_text("Choose the system to get your line.")
        page.get_by_label("System").select_option("windows")
        expect(page.locator("#answer")).to_contain_text("AMD's torch for Windows does not serve gfx942.")
        page.locator("#paste").fill("system=Windows python=3.13.1 torch=2.12.0+cu126 hip=None gpu=")
        expect(page.locator("#answer code").nth(1)).to_contain_text('python -m pip install "torch[device-all]"')
        page.locator("#paste").fill("system=Linux python=3.13.1 torch=2.9.1+rocm6.4 hip=6.4.1 gpu=gfx942")
        expect(page.locator("#answer code").first).to_have_text(re.compile('^pip install "flash_attn==2.8.3'))
