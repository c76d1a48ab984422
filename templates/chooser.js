"use strict";

const AXES = ["python", "torch", "rocm", "gpu", "backend", "flash_attn"];
const NAMES = {python: "Python", torch: "torch", rocm: "ROCm", gpu: "GPU", backend: "backend", flash_attn: "flash-attn"};

const numbers = (version) => version.split(".").map(Number);

// Steps between two minor versions; a major one counts as 100 minor ones.
function steps(ours, theirs) {
  const [a, b] = numbers(ours), [c, d] = numbers(theirs);
  return Math.abs(100 * (a - c) + b - d);
}

function compare(a, b) {
  for (let i = 0; i < Math.max(a.length, b.length); i++) {
    if (a[i] !== b[i]) return (a[i] ?? 0) - (b[i] ?? 0);
  }
  return 0;
}

// The versions in what a terminal printed: the page's own command, torch.utils.collect_env, or pip list.
function parseEnvironment(text) {
  const first = (pattern) => (text.match(pattern) ?? [])[1] ?? "";
  const torch = text.match(/(?:^|[\s'"])(?:torch|pytorch version)['"]?\s*[=:\s]+\s*['"]?(\d+\.\d+)[\w.]*(?:\+([a-z]+)(\d+(?:\.\d+)?)[\w.]*)?/im) ?? [];
  const hip = first(/(?:\bhip|rocm used to build pytorch)\s*[=:]+\s*(\d+\.\d+)/i);
  return {
    python: first(/\bpython(?: version)?\s*[=:]+\s*(\d+\.\d+)/i),
    torch: torch[1] ?? "",
    rocm: hip || (torch[2] === "rocm" ? torch[3] : ""),
    gpus: [...new Set(text.match(/\bgfx[0-9a-f]{3,5}\b/g) ?? [])],
    notRocm: Boolean(torch[1]) && !hip && torch[2] !== "rocm",
  };
}

function matches(wheel, want) {
  return AXES.every((axis) => !want[axis] || (axis === "gpu" ? wheel.targets.includes(want.gpu) : wheel[axis] === want[axis]));
}

// GPU first, then the number of axes that differ, then the steps in torch, ROCm and Python: as which.py has it.
function distance(wheel, want) {
  const off = ["torch", "rocm", "python"].map((axis) => steps(wheel[axis], want[axis]));
  const gpu = want.gpu && !wheel.targets.includes(want.gpu) ? 1 : 0;
  const differing = off.filter(Boolean).length + (want.backend && want.backend !== wheel.backend ? 1 : 0)
    + (want.flash_attn && want.flash_attn !== wheel.flash_attn ? 1 : 0);
  return [gpu, differing, ...off];
}

// The names of the axes in which a wheel is not what is wanted.
const differences = (wheel, want) => AXES.filter((axis) => !matches(wheel, {[axis]: want[axis]})).map((axis) => NAMES[axis]);

// {wheel} with the wheel for a complete choice, or {nearest} with the one that differs least, which may be null.
function choose(wheels, want) {
  const order = (wheel) => [...distance(wheel, want), ...numbers(wheel.flash_attn).map((part) => -part), wheel.backend === "ck" ? 0 : 1];
  let best = null, least = null;
  for (const wheel of wheels) {
    if (wheel.yanked) continue;
    const there = order(wheel);
    if (best === null || compare(there, least) < 0) [best, least] = [wheel, there];
  }
  return best !== null && least[0] === 0 && least[1] === 0 ? {wheel: best} : {nearest: best};
}

// Why PyTorch has no such build, or "" if it has one.
function impossible(want, known) {
  const torch = known[want.torch];
  if (!torch) return "";
  if (!torch.rocm.includes(want.rocm)) return `PyTorch has no build of torch ${want.torch} for ROCm ${want.rocm}, only for ${torch.rocm.join(", ")}.`;
  if (!torch.python.includes(want.python)) return `PyTorch has no build of torch ${want.torch} for Python ${want.python}, only for ${torch.python.join(", ")}.`;
  return "";
}

const indexOf = (wheel) => `rocm${wheel.rocm}/torch${wheel.torch}/simple/`;
const pipLine = (wheel, site) => `pip install "flash_attn==${wheel.version}" --extra-index-url ${site}${indexOf(wheel)}`;

function requestUrl(want, repository) {
  const query = ["python", "torch", "rocm", "gpu", "backend"].filter((axis) => want[axis])
    .map((axis) => `&${axis}=${encodeURIComponent(want[axis])}`);
  return `${repository}/issues/new?template=request_wheel.yml${query.join("")}`;
}

function buildLine(want, known, newest) {
  const line = `./build_rocm.sh ${want.flash_attn || newest} ${want.python} ${known[want.torch]?.full ?? want.torch} ${want.rocm}`;
  return (want.gpu ? `PYTORCH_ROCM_ARCH=${want.gpu} ` : "") + line + (want.backend ? ` --backend ${want.backend}` : "");
}

const describe = (wheel) => `Python ${wheel.python}, torch ${wheel.torch}, ROCm ${wheel.rocm}, ${wheel.backend}, flash-attn ${wheel.flash_attn}`;

function start(page) {
  const at = (id) => page.getElementById(id);
  const {site, repository} = page.body.dataset;
  const known = JSON.parse(at("known").textContent);
  const selects = Object.fromEntries(AXES.map((axis) => [axis, at(axis)]));
  const newest = selects.flash_attn.options[selects.flash_attn.options.length - 1].value;
  const rows = [...page.querySelectorAll("#wheels tbody tr")].map((row) => {
    const {python, torch, rocm, backend, flashAttn, version, targets, yanked, verdict} = row.dataset;
    return {row, python, torch, rocm, backend, flash_attn: flashAttn, version, targets: targets.split(" "), yanked: yanked !== undefined, verdict};
  });

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(page.createElement(tag), properties);
    made.append(...children);
    return made;
  };

  function command(text, label) {
    const code = element("code", {textContent: text});
    const button = element("button", {type: "button", textContent: "Copy"});
    button.setAttribute("aria-label", `Copy ${label}`);
    button.addEventListener("click", () => copy(text, code, button));
    return element("div", {className: "command"}, code, button);
  }

  async function copy(text, code, button) {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Press Ctrl+C";
    }
    at("status").textContent = button.textContent;
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }

  function answer(want, shown) {
    const open = ["python", "torch", "rocm"].filter((axis) => !want[axis]).map((axis) => NAMES[axis]);
    if (open.length) {
      const count = `${shown} wheel${shown === 1 ? "" : "s"} match${shown === 1 ? "es" : ""}.`;
      return ["", [element("p", {}, rows.length ? `${count} ` : "", `Choose ${open.join(", ").replace(/, ([^,]*)$/, " and $1")} to get your line.`)]];
    }
    const {wheel, nearest} = choose(rows, want);
    if (wheel) {
      return ["found", [
        element("h3", {textContent: "Your line"}),
        command(pipLine(wheel, site), "the pip line"),
        element("p", {className: "verdict", textContent: `${describe(wheel)}. ${wheel.verdict}`}),
      ]];
    }
    const why = impossible(want, known);
    const parts = [element("h3", {textContent: why ? "This combination does not exist" : "No such wheel yet"})];
    if (why) parts.push(element("p", {textContent: why}));
    if (nearest) {
      parts.push(element("p", {textContent: `The nearest differs in ${differences(nearest, want).join(", ")}: ${describe(nearest)}, for ${nearest.targets.join(", ")}.`}), command(pipLine(nearest, site), "the line of the nearest wheel"));
    }
    if (!why) {
      parts.push(
        element("p", {}, "Build it, in a clone of ", element("a", {href: repository, textContent: "the repository"}), "; it needs no GPU and no ROCm:"),
        command(buildLine(want, known, newest), "the build line"),
        element("p", {}, "or ", element("a", {id: "request", href: requestUrl(want, repository), textContent: "ask for it"}), ": the form is filled in."),
      );
    }
    return ["missing", parts];
  }

  function chosen() {
    return Object.fromEntries(AXES.map((axis) => [axis, selects[axis].value]));
  }

  function update() {
    const want = chosen();
    let shown = 0;
    for (const wheel of rows) {
      const visible = matches(wheel, want);
      if (wheel.row.hidden === visible) wheel.row.hidden = !visible;
      shown += visible;
    }
    page.querySelector(".table")?.toggleAttribute("hidden", shown === 0);
    const [state, parts] = answer(want, shown);
    at("answer").dataset.state = state;
    at("answer").replaceChildren(...parts);
    at("count").textContent = rows.length ? `${shown} of ${rows.length}` : "";
    const fragment = new URLSearchParams(Object.entries(want).filter(([, value]) => value)).toString();
    history.replaceState(null, "", fragment ? `#${fragment}` : location.pathname + location.search);
  }

  // Selects what is on offer, and returns what is not.
  function select(found) {
    const unknown = [];
    for (const [axis, value] of Object.entries(found)) {
      if (!value || !selects[axis]) continue;
      if ([...selects[axis].options].some((option) => option.value === value)) selects[axis].value = value;
      else unknown.push(`${NAMES[axis]} ${value}`);
    }
    return unknown;
  }

  function paste() {
    const text = at("paste").value;
    const found = parseEnvironment(text);
    for (const axis of ["python", "torch", "rocm", "gpu"]) selects[axis].value = "";
    const offered = found.gpus.find((gpu) => [...selects.gpu.options].some((option) => option.value === gpu));
    const unknown = select({python: found.python, torch: found.torch, rocm: found.rocm, gpu: offered ?? found.gpus[0]});
    const notes = [];
    if (text.trim() && !found.python && !found.torch) notes.push("There is no Python or torch version in this text.");
    if (found.notRocm) notes.push("This torch is not built for ROCm: install PyTorch's ROCm build first.");
    if (unknown.length) notes.push(`Not known here: ${unknown.join(", ")}.`);
    at("pasted").textContent = notes.join(" ");
    update();
  }

  at("paste").addEventListener("input", paste);
  for (const control of Object.values(selects)) control.addEventListener("change", update);
  at("reset").addEventListener("click", () => {
    for (const control of Object.values(selects)) control.value = "";
    at("paste").value = at("pasted").textContent = "";
    update();
    selects.python.focus();
  });
  const detect = command(at("command").textContent.trim(), "the command");
  detect.classList.add("one-line");
  at("command").replaceWith(detect);
  page.body.classList.add("live");
  select(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
  update();
}

if (typeof document !== "undefined") start(document);
