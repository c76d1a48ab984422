const path = require("path");
const { DefaultArtifactClient } = require("@actions/artifact");
const core = require("@actions/core");
const { minimatch } = require("minimatch");

async function run() {
  const client = new DefaultArtifactClient();
  const [name, pattern] = [core.getInput("name"), core.getInput("pattern")];
  const target = path.resolve(core.getInput("path"));
  const { artifacts } = await client.listArtifacts({ latest: true });
  const found = artifacts.filter((each) => (name ? each.name === name : minimatch(each.name, pattern)));
  if (name && found.length === 0) throw new Error(`there is no artifact ${name}`);
  const merged = name || core.getInput("merge-multiple") === "true";
  for (const artifact of found) {
    const where = merged ? target : path.join(target, artifact.name);
    await client.downloadArtifact(artifact.id, { path: where });
    core.info(`${artifact.name} -> ${where}`);
  }
}

run().catch((error) => core.setFailed(error.message));
