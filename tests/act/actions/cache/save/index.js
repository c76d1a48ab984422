const cache = require("@actions/cache");
const core = require("@actions/core");

async function run() {
  const key = core.getInput("key", { required: true });
  await cache.saveCache([core.getInput("path", { required: true })], key);
  core.info(`saved ${key}`);
}

run().catch((error) => core.warning(error.message)); // a cache that is not saved fails no job
