const path = require("path");
const { DefaultArtifactClient } = require("@actions/artifact");
const core = require("@actions/core");
const { minimatch } = require("minimatch");

// A single match lands in `path` itself, as in the pinned version: docs/notes/actions.md.
async function run() {
  const client = new DefaultArtifactClient();
  const [name, pattern] = [core.getInput("name"), core.getInput("pattern")];
  const target = path.resolve(core.getInput("path") || process.env.GITHUB_WORKSPACE || ".");
  const { artifacts } = await client.listArtifacts({ latest: true });
  const chosen = artifacts.filter((each) => (name ? each.name === name : !pattern || minimatch(each.name, pattern)));
  if (name && chosen.length === 0) throw new Error(`Artifact '${name}' not found`);
  const flat = Boolean(name) || core.getInput("merge-multiple") === "true" || chosen.length === 1;
  for (const artifact of chosen) {
    const where = flat ? target : path.join(target, artifact.name);
    await client.downloadArtifact(artifact.id, { path: where });
    core.info(`${artifact.name} -> ${where}`);
  }
}

run().catch((error) => core.setFailed(error.message));
