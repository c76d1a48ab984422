const fs = require("fs");
const path = require("path");
const { DefaultArtifactClient } = require("@actions/artifact");
const core = require("@actions/core");
const glob = require("@actions/glob");

// The root of an artifact: of several search paths the common directory, of a file its parent, else the search path.
function rootOf(searched, files) {
  if (searched.length > 1) {
    const parts = searched.map((each) => path.normalize(each).split(path.sep));
    let same = 0;
    while (same < Math.min(...parts.map((each) => each.length)) && parts.every((each) => each[same] === parts[0][same])) same++;
    return parts[0].slice(0, same).join(path.sep) || path.sep;
  }
  return files.length === 1 && searched[0] === files[0] ? path.dirname(files[0]) : searched[0];
}

async function run() {
  const name = core.getInput("name", { required: true });
  const options = { excludeHiddenFiles: core.getInput("include-hidden-files") !== "true" };
  const globber = await glob.create(core.getInput("path", { required: true }), options);
  const files = (await globber.glob()).filter((file) => !fs.statSync(file).isDirectory());
  if (files.length === 0) {
    if (core.getInput("if-no-files-found") === "error") throw new Error("no files were found with the provided path");
    return;
  }
  const client = new DefaultArtifactClient();
  if (core.getInput("overwrite") === "true") {
    const { artifacts } = await client.listArtifacts();
    if (artifacts.some((artifact) => artifact.name === name)) await client.deleteArtifact(name);
  }
  const done = await client.uploadArtifact(name, files, rootOf(globber.getSearchPaths(), files));
  core.info(`${name}: ${files.length} files, ${done.size} bytes`);
}

run().catch((error) => core.setFailed(error.message));
