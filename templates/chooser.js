"use strict";

const AXES = ["python", "torch", "rocm", "gpu", "backend", "flash_attn", "platform"];
const NAMES = {python: "Python", torch: "torch", rocm: "ROCm", gpu: "GPU", backend: "backend", flash_attn: "flash-attn", platform: "system"};
const FIRST_PROGRAM = '{python} -c "import torch, flash_attn; q = torch.randn(3, 1, 512, 8, 64, device=\'cuda\', dtype=torch.bfloat16); print(flash_attn.flash_attn_func(*q, causal=True).shape)"';
const UNSERVED = 2; // the rank of a GPU that no wheel serves: advice.py

const numbers = (version) => (version.match(/\d+/g) ?? []).map(Number);

function compare(a, b) {
  for (let i = 0; i < Math.max(a.length, b.length); i++) {
    if (a[i] !== b[i]) return (a[i] ?? -1) - (b[i] ?? -1);
  }
  return 0;
}

// The versions in what a terminal printed: the page's own command, torch.utils.collect_env, or pip list. hip is true
// or false where a torch is named.
function parseEnvironment(text) {
  const first = (pattern) => (text.match(pattern) ?? [])[1] ?? "";
  const torch = text.match(/(?:^|[\s'"])(?:torch|pytorch version)['"]?\s*[=:\s]+\s*['"]?(\d+\.\d+)[\w.]*(?:\+([\w.]+))?/im) ?? [];
  const hip = first(/(?:\bhip|rocm used to build pytorch)\s*[=:]+\s*(\d+\.\d+)/i);
  const python = text.match(/\bpython(?: version)?\s*[=:]+\s*(\d+\.\d+)([\w.]*)/i) ?? [];
  const freeThreaded = python[2]?.endsWith("t") || /free-threading/.test(text);
  const rocm = hip || ((torch[2] ?? "").match(/^rocm(\d+\.\d+)/) ?? [])[1] || "";
  const system = first(/^(?:.*\bsystem=|OS: |Python platform: )(\S.*)/m);
  return {
    python: python[1] ? python[1] + (freeThreaded ? "t" : "") : "",
    torch: torch[1] ?? "",
    rocm,
    label: torch[2] ?? "",
    gpus: [...new Set(text.match(/\bgfx[0-9a-f]{3,5}\b/g) ?? [])],
    notRocm: Boolean(torch[1]) && !rocm && !/^rocm/.test(torch[2] ?? ""),
    unsaid: /^rocm/.test(torch[2] ?? "") && !rocm, // AMD's label "rocmsdk20260116" names a day
    platform: systemIn(system),
    elsewhere: Boolean(system) && !systemIn(system),
  };
}

// "windows" or "linux", by the name of a system; "" where it is unknown, such as on a phone.
function systemIn(name) {
  if (/windows|win32|win64/i.test(name)) return "windows";
  return /linux|ubuntu|debian|fedora|red hat|suse|arch/i.test(name) && !/android/i.test(name) ? "linux" : "";
}

// The class of a version on an axis of the table: 0 for no version, else the last bound that is not above it.
const classOf = (bounds, version) => (version ? bounds.filter((bound) => compare(numbers(bound), numbers(version).slice(0, 2)) <= 0).length : 0);

// The answer of advice.py for one GPU, from the table.
function lookUp(known, gpu, want) {
  const classes = [
    gpu ? known.gpus[gpu]?.[0] ?? 1 : 0,
    known.systems.indexOf(want.platform),
    ...["python", "torch", "rocm"].map((axis) => classOf(known.bounds[axis], want[axis])),
    want.platform === "linux" && (!want.label || new RegExp(`^(${known.pytorch_label})$`).test(want.label)) ? 0 : 1,
  ];
  // The table is unrolled at its first use: "3*12" is twelve times answer 3.
  known.unrolled ??= known.runs.split(" ").flatMap((run) => Array(Number(run.split("*")[1])).fill(Number(run.split("*")[0])));
  return known.answers[known.unrolled[classes.reduce((sum, value, axis) => sum * known.sizes[axis] + value, 0)]];
}

// The GPUs that the answer is for: cards that wheels serve, else the GPUs in processors, else all. As in advice.py.
function counting(known, gpus, platform) {
  const rank = (gpu) => known.gpus[gpu]?.[1 + known.systems.indexOf(platform)] ?? UNSERVED;
  const best = Math.min(...gpus.map(rank));
  return [...new Set(gpus)].filter((gpu) => rank(gpu) === best);
}

// What advice.advise gives for a machine: want has gpus, platform, python, torch, rocm, and the label of torch's version.
function advise(known, want) {
  if (want.python.endsWith("t")) {
    return {state: known.states[2], reason: known.free_threaded.replaceAll("{python}", want.python.slice(0, -1)), notes: []};
  }
  const gpus = counting(known, want.gpus, want.platform);
  const answers = (gpus.length ? gpus : [""]).map((gpu) => [gpu, lookUp(known, gpu, want)]);
  const [gpu, worst] = answers.reduce((a, b) => (known.states.indexOf(b[1].state) > known.states.indexOf(a[1].state) ? b : a));
  const devices = [...gpus].sort().map((each) => `device-${each}`).join(",");
  const fill = (text) => text.replaceAll("{gpu}", gpu).replaceAll("{devices}", devices);
  const others = [...new Set(want.gpus)].filter((each) => !gpus.includes(each)).join(", ");
  const notes = [...worst.notes.map(fill), ...(others ? [known.beside.replace("{others}", others)] : [])];
  return {...worst, reason: fill(worst.reason), torch: fill(worst.torch), notes};
}

// The universal wheel is for every ROCm, and for the torch and Python that the table accepts.
const isUniversal = (wheel) => wheel.torch === "";

// Whether a wheel matches the choice on one axis. It must support at least one of several chosen GPUs.
function fits(wheel, want, axis) {
  if (axis === "gpu") return !want.gpus.length || want.gpus.some((gpu) => wheel.targets.includes(gpu));
  return !want[axis] || wheel[axis] === want[axis] || (isUniversal(wheel) && ["python", "torch", "rocm"].includes(axis));
}

const matches = (wheel, want) => AXES.every((axis) => fits(wheel, want, axis));

// The first wheel of the list that fits, which is the newest; a wheel of one combination fits a complete choice alone.
const choose = (wheels, want) =>
  wheels.find((wheel) => wheel.yanked === null && matches(wheel, want) && (isUniversal(wheel) || (want.python && want.torch && want.rocm)));

const pip = (platform) => (platform === "windows" ? "python -m pip" : "pip"); // a portable Python is not in PATH
const indexOf = (wheel) => (isUniversal(wheel) ? "simple/" : `rocm${wheel.rocm}/torch${wheel.torch}/simple/`);
const pipLine = (wheel, site) => `${pip(wheel.platform)} install "flash_attn==${wheel.version}" --extra-index-url ${site}${indexOf(wheel)}`;

function requestUrl(want, repository) {
  const query = ["python", "torch", "rocm", "gpu", "backend"].filter((axis) => want[axis])
    .map((axis) => `&${axis}=${encodeURIComponent(want[axis])}`);
  return `${repository}/issues/new?template=request_wheel.yml${query.join("")}`;
}

function buildLine(want, newest) {
  const targets = want.gpus.length ? `PYTORCH_ROCM_ARCH="${want.gpus.join(";")}" ` : "";
  return `${targets}./build_rocm.sh ${want.flash_attn || newest}${want.platform === "windows" ? " --platform windows" : ""}`;
}

function describe(wheel, known) {
  const versions = isUniversal(wheel)
    ? `Python ${wheel.python} and newer, torch ${known.bounds.torch[1]} and newer, every ROCm`
    : `Python ${wheel.python}, torch ${wheel.torch}, ROCm ${wheel.rocm}`;
  return `${versions}, ${wheel.backend}, flash-attn ${wheel.flash_attn}`;
}

function start(page) {
  const at = (id) => page.getElementById(id);
  const {site, repository} = page.body.dataset;
  const known = JSON.parse(at("known").textContent);
  const selects = Object.fromEntries(AXES.map((axis) => [axis, at(axis)]));
  const here = systemIn(navigator.userAgent);
  let pasted = {}; // what was pasted and no choice holds: the label of torch, whether it is for ROCm, another system
  const newest = [...selects.flash_attn.options].map((option) => option.value).filter((value) => !value.includes("post")).pop();
  const rows = [...page.querySelectorAll("#wheels tbody tr")].map((row) => {
    const {platform, python, torch, rocm, backend, flashAttn, version, targets, yanked, verdict} = row.dataset;
    return {row, platform, python, torch, rocm, backend, flash_attn: flashAttn, version, targets: targets.split(" "), yanked: yanked ?? null, verdict};
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

  // The steps for a machine: torch, variables, the wheel, the doctor, a first program.
  function steps(want, advice, wheel) {
    const windows = want.platform === "windows";
    const shell = (name, value) => (windows ? `$env:${name} = "${value}"` : `export ${name}=${value}`);
    const python = windows ? "python" : "python3";
    const paragraph = (text) => element("p", {textContent: text});
    const torch = advice.state === "torch" ? [
      paragraph(`1. ${advice.reason}`),
      ...(advice.remove ? [command(`${pip(want.platform)} uninstall -y torch torchvision torchaudio`, "the line that removes torch")] : []),
      command(`${pip(want.platform)} ${advice.torch}`, "the line that installs torch"),
      paragraph("2. Then the wheel:"),
    ] : [];
    const left = want.gpus.filter((gpu) => !wheel.targets.includes(gpu));
    return [
      ...torch,
      command(pipLine(wheel, site), "the pip line"),
      element("p", {className: "verdict", textContent: `${describe(wheel, known)}. ${wheel.verdict}`}),
      ...Object.entries(advice.variables).flatMap(([name, value]) => [paragraph("Before Python starts:"), command(shell(name, value), "the variable")]),
      ...advice.notes.map(paragraph),
      ...(left.length ? [paragraph(`It has no kernels for ${left.join(", ")}.`)] : []),
      paragraph("Check it, then call it:"),
      command(`${python} -m flash_attn.doctor`, "the line that checks it"),
      command(FIRST_PROGRAM.replace("{python}", python), "the first program"),
    ];
  }

  function answer(chosen) {
    if (pasted.elsewhere && !chosen.platform) return ["missing", [element("p", {textContent: known.elsewhere})]];
    if (!chosen.platform) return ["", [element("p", {textContent: "Choose the system to get your line."})]];
    if (pasted.unsaid && !chosen.rocm) return ["", [element("p", {textContent: `The label ${pasted.label} does not say torch's ROCm: choose it, or run the command above.`})]];
    // A torch is installed where its ROCm is known too, or where the paste says that it has none.
    const complete = chosen.torch && (chosen.rocm || pasted.notRocm);
    const want = complete ? chosen : {...chosen, torch: "", rocm: ""};
    const advice = advise(known, {...want, label: pasted.label});
    if (advice.state === "refuse") {
      return ["missing", [element("h3", {textContent: "This cannot work"}), element("p", {textContent: advice.reason})]];
    }
    const counted = {...want, gpus: counting(known, want.gpus, want.platform)};
    const wheel = choose(rows, advice.state === "torch" ? {...counted, torch: "", rocm: ""} : counted);
    if (wheel) {
      const title = advice.state === "torch" ? "torch first, then one wheel" : isUniversal(wheel) ? "One wheel for your torch" : "Your line";
      return [advice.state === "torch" ? "torch" : "found", [element("h3", {textContent: title}), ...steps(counted, advice, wheel)]];
    }
    const withdrawn = rows.find((row) => row.yanked !== null && matches(row, counted));
    const line = command(buildLine(counted, newest), "the build line");
    return ["missing", [
      element("h3", {textContent: withdrawn ? `Withdrawn: ${withdrawn.yanked}` : "No such wheel yet"}),
      ...(advice.state === "torch" ? [element("p", {textContent: advice.reason}), command(`${pip(want.platform)} ${advice.torch}`, "the line that installs torch")] : []),
      element("p", {}, "Build it, in a clone of ", element("a", {href: repository, textContent: "the repository"}), ", on Linux or in WSL; it needs no GPU and no ROCm:"),
      line,
      element("p", {}, "or ", element("a", {id: "request", href: requestUrl({...want, gpu: want.gpus.join(",")}, repository), textContent: "ask for it"}), ": the form is filled in."),
    ]];
  }

  function update() {
    const chosen = Object.fromEntries(AXES.map((axis) => [axis, selects[axis].value]));
    const want = {...chosen, gpus: chosen.gpu.split(",").filter(Boolean)};
    let shown = 0;
    for (const wheel of rows) {
      const visible = matches(wheel, want);
      if (wheel.row.hidden === visible) wheel.row.hidden = !visible;
      shown += visible;
    }
    page.querySelector(".table")?.toggleAttribute("hidden", shown === 0);
    const [state, parts] = answer(want);
    at("answer").dataset.state = state;
    at("answer").replaceChildren(...parts);
    at("count").textContent = rows.length ? `${shown} of ${rows.length}` : "";
    const fragment = new URLSearchParams(Object.entries(chosen).filter(([, value]) => value)).toString().replaceAll("%2C", ",");
    history.replaceState(null, "", fragment ? `#${fragment}` : location.pathname + location.search);
  }

  // Selects what is on offer, and returns what is not. GPUs are wanted all the same: several, or one without kernels.
  function select(found) {
    const unknown = [];
    for (const [axis, value] of Object.entries(found)) {
      if (!value || !selects[axis]) continue;
      if ([...selects[axis].options].some((option) => option.value === value)) selects[axis].value = value;
      else if (axis === "gpu") {
        unknown.push(...value.split(",").filter((gpu) => !known.gpus[gpu]).map((gpu) => `${NAMES.gpu} ${gpu}`));
        selects.gpu.add(new Option(value.replaceAll(",", ", "), value, false, true));
      } else {
        unknown.push(`${NAMES[axis]} ${value}`);
        selects[axis].add(new Option(value, value, false, true)); // the answer depends on it all the same
      }
    }
    return unknown;
  }

  function paste() {
    const text = at("paste").value;
    const found = parseEnvironment(text);
    for (const axis of ["python", "torch", "rocm", "gpu"]) selects[axis].value = "";
    selects.platform.value = found.elsewhere ? "" : found.platform || selects.platform.value || here;
    pasted = found;
    const {python, torch, rocm, gpus} = found;
    const unknown = select({python, torch, rocm, gpu: gpus.join(",")});
    const notes = [];
    if (text.trim() && !found.python && !found.torch) notes.push("There is no Python or torch version in this text.");
    if (unknown.length) notes.push(`Not known here: ${unknown.join(", ")}.`);
    at("pasted").textContent = notes.join(" ");
    update();
    if (found.torch) at("answer").scrollIntoView({block: "nearest"}); // on a phone it is below the choices
  }

  at("paste").addEventListener("input", paste);
  for (const control of Object.values(selects)) control.addEventListener("change", update);
  at("reset").addEventListener("click", () => {
    for (const [axis, control] of Object.entries(selects)) control.value = axis === "platform" ? here : "";
    at("paste").value = at("pasted").textContent = "";
    pasted = {};
    update();
    selects.python.focus();
  });
  const detect = command(at("command").textContent.trim(), "the command");
  detect.classList.add("one-line");
  at("command").replaceWith(detect);
  page.body.classList.add("live");
  at("list")?.removeAttribute("open"); // without a script it is all that there is
  select({platform: here, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1)))});
  update();
}

if (typeof document !== "undefined") start(document);
