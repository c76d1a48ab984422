const fs = require("fs");
const path = require("path");
const { DefaultArtifactClient } = require("@actions/artifact");
const core = require("@actions/core");
const glob = require("@actions/glob");

// The root of an artifact: the one directory that is given, else the deepest directory that holds all files.
function rootOf(searched, files) {
  if (searched.length === 1 && fs.existsSync(searched[0]) && fs.statSync(searched[0]).isDirectory()) {
    return searched[0];
  }
  let root = path.dirname(files[0]);
  while (!files.every((file) => file.startsWith(root + path.sep))) root = path.dirname(root);
  return root;
}

async function run() {
  const name = core.getInput("name", { required: true });
  const globber = await glob.create(core.getInput("path", { required: true }));
  const files = (await globber.glob()).filter((file) => fs.statSync(file).isFile());
  if (files.length === 0) {
    if (core.getInput("if-no-files-found") === "error") throw new Error("no file was found");
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
