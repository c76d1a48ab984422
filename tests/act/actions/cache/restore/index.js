const cache = require("@actions/cache");
const core = require("@actions/core");

async function run() {
  const key = core.getInput("key", { required: true });
  const others = core.getInput("restore-keys").split("\n").map((line) => line.trim()).filter(Boolean);
  core.setOutput("cache-primary-key", key);
  const found = await cache.restoreCache([core.getInput("path", { required: true })], key, others);
  if (found) core.setOutput("cache-hit", String(found === key)); // empty where nothing is cached
  core.info(found ? `restored ${found}` : `nothing is cached for ${key}`);
}

run().catch((error) => core.setFailed(error.message));
