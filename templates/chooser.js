"use strict";

const AXES = ["python", "torch", "rocm", "gpu", "backend", "flash_attn", "platform"];
const DEFAULT_BACKEND = "ck";
const OLDEST_TORCH = "2.5"; // that the universal wheel runs with
const NAMES = {python: "Python", torch: "torch", rocm: "ROCm", gpu: "GPU", backend: "backend", flash_attn: "flash-attn", platform: "system"};

const numbers = (version) => version.replace(".post", ".").split(".").map(Number); // 2.8.3.post2 too

// Distance between two versions, in minor versions. A major version counts as 100 minor versions.
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
    platform: systemIn(first(/^(?:.*\bsystem=|OS: |Python platform: )(.*)/m)),
  };
}

// "windows" or "linux", by the name of a system; "" where it is unknown, such as on a phone.
function systemIn(name) {
  if (/windows|win32|win64/i.test(name)) return "windows";
  return /linux|ubuntu|debian|fedora|red hat|suse/i.test(name) && !/android/i.test(name) ? "linux" : "";
}

// The universal wheel supports every ROCm, torch from OLDEST_TORCH on, and Python from the version in its name on.
const isUniversal = (wheel) => wheel.torch === "";
const oldestOf = (wheel) => ({torch: OLDEST_TORCH, rocm: "", python: wheel.python});

// Whether a wheel matches the choice on one axis. It must support at least one of several chosen GPUs.
function fits(wheel, want, axis) {
  if (axis === "gpu") return !want.gpus.length || want.gpus.some((gpu) => wheel.targets.includes(gpu));
  if (!want[axis]) return true;
  if (!isUniversal(wheel) || !(axis in oldestOf(wheel))) return wheel[axis] === want[axis];
  const oldest = oldestOf(wheel)[axis];
  return !oldest || compare(numbers(want[axis]), numbers(oldest)) >= 0;
}

// Steps between the wheel's version and the wanted one, 0 where the wheel fits.
function off(wheel, want, axis) {
  if (!isUniversal(wheel)) return steps(wheel[axis], want[axis]);
  return fits(wheel, want, axis) ? 0 : steps(oldestOf(wheel)[axis], want[axis]);
}

const matches = (wheel, want) => AXES.every((axis) => fits(wheel, want, axis));

// Compare by GPU, then by the number of axes that differ, then by the steps in torch, ROCm and Python. which.py has the
// same order.
function distance(wheel, want) {
  const away = ["torch", "rocm", "python"].map((axis) => off(wheel, want, axis));
  const differing = away.filter(Boolean).length + ["backend", "flash_attn", "platform"].filter((axis) => !fits(wheel, want, axis)).length;
  return [fits(wheel, want, "gpu") ? 0 : 1, differing, ...away];
}

// The names of the axes in which a wheel is not what is wanted.
const differences = (wheel, want) => AXES.filter((axis) => !fits(wheel, want, axis)).map((axis) => NAMES[axis]);

// {wheel} with the wheel for a complete choice, or {nearest} with the one that differs least, which may be null.
function choose(wheels, want) {
  // The newest release, before its post releases, in the universal wheel.
  const order = (wheel) => {
    const [major, minor, patch, post = 0] = numbers(wheel.flash_attn);
    return [...distance(wheel, want), -major, -minor, -patch, post, isUniversal(wheel) ? 0 : 1, wheel.backend === "ck" ? 0 : 1];
  };
  let best = null, least = null;
  for (const wheel of wheels) {
    if (wheel.yanked !== null) continue;
    const there = order(wheel);
    if (best === null || compare(there, least) < 0) [best, least] = [wheel, there];
  }
  return best !== null && least[0] === 0 && least[1] === 0 ? {wheel: best} : {nearest: best};
}

// The universal wheel of the newest flash-attn that is nothing else than what is wanted, or null. What is not chosen yet
// is of no importance to it.
function universalFor(wheels, want) {
  const fitting = wheels.filter((wheel) => isUniversal(wheel) && wheel.yanked === null && matches(wheel, want));
  const order = (wheel) => {
    const [major, minor, patch, post = 0] = numbers(wheel.flash_attn);
    return [-major, -minor, -patch, post];
  };
  return fitting.sort((a, b) => compare(order(a), order(b)))[0] ?? null;
}

// The wanted GPUs for which a wheel of these versions can have kernels, from its backend or from Triton. Empty if the
// requested backend supports none of them.
function fitting(want, known) {
  const since = (gpu) => known.targets[gpu] ?? {};
  const serves = (gpu, backend) => since(gpu)[backend] && compare(numbers(since(gpu)[backend]), numbers(want.rocm)) <= 0;
  const fit = want.gpus.filter((gpu) => serves(gpu, want.backend || DEFAULT_BACKEND) || serves(gpu, "triton"));
  return !want.backend || fit.some((gpu) => since(gpu)[want.backend]) ? fit : [];
}

// Why build_rocm.sh would refuse these versions, or "" if it builds them: as which.py has it.
function impossible(want, known) {
  const torch = known.torch[want.torch];
  if (!torch) return `torch ${want.torch} is not known here, only ${Object.keys(known.torch).join(", ")}.`;
  const rocms = Object.keys(torch.rocm);
  if (!rocms.includes(want.rocm)) return `PyTorch's index has no torch ${want.torch} for ROCm ${want.rocm}, only for ${rocms.join(", ")}.`;
  if (!torch.python.includes(want.python)) return `With torch ${want.torch} these wheels are for Python ${torch.python.join(", ")}, not for ${want.python}.`;
  if (!want.gpus.length || fitting(want, known).length) return "";
  const backend = want.backend || DEFAULT_BACKEND;
  const why = want.gpus.map((gpu) => {
    const since = known.targets[gpu];
    if (!since) return `${gpu} (none at all)`;
    if (want.backend && !since[want.backend]) return `${gpu} (none of ${want.backend})`;
    return `${gpu} (from ROCm ${since[backend] ?? since.triton} on)`;
  });
  return `There are no kernels for ${why.join(", ")}.`;
}

const indexOf = (wheel) => (isUniversal(wheel) ? "simple/" : `rocm${wheel.rocm}/torch${wheel.torch}/simple/`);
const pip = (platform) => (platform === "windows" ? "python -m pip" : "pip"); // a portable Python is not in PATH
const pipLine = (wheel, site) => `${pip(wheel.platform)} install "flash_attn==${wheel.version}" --extra-index-url ${site}${indexOf(wheel)}`;

// Why no wheel for Windows can serve what is wanted, or "": as which.py has it.
function unserved(want, known) {
  if (want.backend && want.backend !== "triton") return `A wheel for Windows has Triton kernels alone, none of ${want.backend}.`;
  if (want.gpus.length && !want.gpus.some((gpu) => known.windows.includes(gpu))) return `AMD's torch for Windows does not serve ${want.gpus.join(", ")}.`;
  return "";
}

function windowsBuildLine(want, known, newest) {
  const fit = want.gpus.filter((gpu) => known.windows.includes(gpu));
  return (fit.length ? `PYTORCH_ROCM_ARCH="${fit.join(";")}" ` : "") + `./build_rocm.sh ${want.flash_attn || newest} --platform windows`;
}

// The command that installs torch of a minor version for that ROCm, or else for torch's newest ROCm. It names the label
// of torch's version, because otherwise pip keeps another build of that version.
function torchLine(torch, rocm, known) {
  const {full, rocm: directories} = known.torch[torch];
  const newest = Object.keys(directories).sort((a, b) => compare(numbers(b), numbers(a)))[0];
  const directory = directories[rocm] ?? directories[newest];
  return `pip install "torch==${full}+${directory}" --index-url https://download.pytorch.org/whl/${directory}`;
}

// What to do with the wheel that differs least: "line" installs it, "torch" has to change first, "" is of no use here.
function useOf(nearest, want) {
  if (!["gpu", "python"].every((axis) => fits(nearest, want, axis))) return "";
  return ["torch", "rocm"].every((axis) => fits(nearest, want, axis)) ? "line" : isUniversal(nearest) ? "" : "torch";
}

function requestUrl(want, repository) {
  const query = ["python", "torch", "rocm", "gpu", "backend"].filter((axis) => want[axis])
    .map((axis) => `&${axis}=${encodeURIComponent(want[axis])}`);
  return `${repository}/issues/new?template=request_wheel.yml${query.join("")}`;
}

function buildLine(want, known, newest) {
  const fit = fitting(want, known);
  const line = `./build_rocm.sh ${want.flash_attn || newest} ${want.python} ${known.torch[want.torch].full} ${want.rocm}`;
  return (fit.length ? `PYTORCH_ROCM_ARCH="${fit.join(";")}" ` : "") + line + (want.backend ? ` --backend ${want.backend}` : "");
}

function describe(wheel) {
  const versions = isUniversal(wheel)
    ? `Python ${wheel.python} and newer, torch ${OLDEST_TORCH} and newer, every ROCm`
    : `Python ${wheel.python}, torch ${wheel.torch}, ROCm ${wheel.rocm}`;
  return `${versions}, ${wheel.backend}, flash-attn ${wheel.flash_attn}`;
}

function start(page) {
  const at = (id) => page.getElementById(id);
  const {site, repository} = page.body.dataset;
  const known = JSON.parse(at("known").textContent);
  const selects = Object.fromEntries(AXES.map((axis) => [axis, at(axis)]));
  const here = systemIn(navigator.userAgent);
  let notRocm = false; // what was pasted says that torch is not built for ROCm
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

  function answer(want, shown) {
    if (!want.platform) return ["", [element("p", {textContent: "Choose the system to get your line."})]];
    if (notRocm && want.platform === "windows") {
      return ["missing", [
        element("h3", {textContent: "Install torch for ROCm first"}),
        element("p", {textContent: "The torch in what you pasted is not built for ROCm. Replace it, and paste again:"}),
        command("python -m pip uninstall -y torch torchvision torchaudio", "the line that removes torch"),
        command(`python -m pip ${known.windows_torch}`, "the line that installs torch"),
      ]];
    }
    if (notRocm && want.torch) {
      const there = !want.rocm || known.torch[want.torch]?.rocm[want.rocm];
      return ["missing", [
        element("h3", {textContent: "Install torch for ROCm first"}),
        element("p", {textContent: "The torch in what you pasted is not built for ROCm. Replace it, and paste again:"}),
        ...(there ? [command(torchLine(want.torch, want.rocm, known), "the line that installs torch")] : [element("p", {textContent: impossible(want, known)})]),
      ]];
    }
    const universal = universalFor(rows, want);
    const open = universal || want.platform === "windows" ? [] : ["python", "torch", "rocm"].filter((axis) => !want[axis]).map((axis) => NAMES[axis]);
    if (open.length) {
      const count = `${shown} wheel${shown === 1 ? "" : "s"} match${shown === 1 ? "es" : ""}.`;
      return ["", [element("p", {}, rows.length ? `${count} ` : "", `Choose ${open.join(", ").replace(/, ([^,]*)$/, " and $1")} to get your line.`)]];
    }
    const onWindows = want.platform === "windows"; // where there are universal wheels alone
    const {wheel, nearest} = universal ? {wheel: universal} : onWindows ? {} : choose(rows, want);
    if (wheel) {
      const left = want.gpus.filter((gpu) => !wheel.targets.includes(gpu));
      return ["found", [
        element("h3", {textContent: isUniversal(wheel) ? "One wheel for every torch from 2.5 on" : "Your line"}),
        command(pipLine(wheel, site), "the pip line"),
        element("p", {className: "verdict", textContent: `${describe(wheel)}. ${wheel.verdict}`}),
        ...(left.length ? [element("p", {textContent: `It has no kernels for ${left.join(", ")}.`})] : []),
      ]];
    }
    const why = onWindows ? unserved(want, known) : impossible(want, known);
    const withdrawn = rows.find((row) => row.yanked !== null && matches(row, want));
    const title = withdrawn ? `Withdrawn: ${withdrawn.yanked}` : why ? "This combination does not exist" : "No such wheel yet";
    const parts = [element("h3", {textContent: title})];
    if (why) parts.push(element("p", {textContent: why}));
    if (nearest) {
      const use = useOf(nearest, want);
      parts.push(element("p", {textContent: `The nearest differs in ${differences(nearest, want).join(", ")}: ${describe(nearest)}, for ${nearest.targets.join(", ")}.`}));
      if (use === "line") parts.push(command(pipLine(nearest, site), "the line of the nearest wheel"));
      if (use === "torch") {
        parts.push(
          element("p", {textContent: `That wheel needs torch ${nearest.torch} for ROCm ${nearest.rocm}. If you can change your torch, do it first, and paste again:`}),
          command(torchLine(nearest.torch, nearest.rocm, known), "the line that installs torch"),
        );
      }
    }
    if (!why) {
      parts.push(
        element("p", {}, "Build it, in a clone of ", element("a", {href: repository, textContent: "the repository"}), "; it needs no GPU and no ROCm:"),
        command(onWindows ? windowsBuildLine(want, known, newest) : buildLine(want, known, newest), "the build line"),
        ...(onWindows ? [element("p", {textContent: "Run it on Linux or in WSL."})] : [element("p", {}, "or ", element("a", {id: "request", href: requestUrl({...want, gpu: want.gpus.join(",")}, repository), textContent: "ask for it"}), ": the form is filled in.")]),
      );
    }
    return ["missing", parts];
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
    const [state, parts] = answer(want, shown);
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
        unknown.push(...value.split(",").filter((gpu) => !known.targets[gpu]).map((gpu) => `${NAMES.gpu} ${gpu}`));
        selects.gpu.add(new Option(value.replaceAll(",", ", "), value, false, true));
      } else unknown.push(`${NAMES[axis]} ${value}`);
    }
    return unknown;
  }

  function paste() {
    const text = at("paste").value;
    const found = parseEnvironment(text);
    for (const axis of ["python", "torch", "rocm", "gpu"]) selects[axis].value = "";
    selects.platform.value = found.platform || selects.platform.value || here;
    notRocm = found.notRocm;
    const unknown = select({...found, gpu: found.gpus.join(",")});
    const notes = [];
    if (text.trim() && !found.python && !found.torch) notes.push("There is no Python or torch version in this text.");
    if (found.notRocm) notes.push("This torch is not built for ROCm: install PyTorch's ROCm build first.");
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
    notRocm = false;
    update();
    selects.python.focus();
  });
  const detect = command(at("command").textContent.trim(), "the command");
  detect.classList.add("one-line");
  at("command").replaceWith(detect);
  page.body.classList.add("live");
  select({platform: here, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1)))});
  update();
}

if (typeof document !== "undefined") start(document);
