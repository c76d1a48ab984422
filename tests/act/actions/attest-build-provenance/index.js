const crypto = require("crypto");
const fs = require("fs");
const core = require("@actions/core");
const glob = require("@actions/glob");

async function run() {
  const globber = await glob.create(core.getInput("subject-path", { required: true }));
  const files = (await globber.glob()).filter((file) => fs.statSync(file).isFile());
  if (files.length === 0) throw new Error(`Could not find subject at path ${core.getInput("subject-path")}`);
  if (files.length > 1024) throw new Error("Too many subjects specified (>1024).");
  const workflow = `.github/workflows/${process.env.GITHUB_JOB === "sign_crate" ? "build" : "_build_rocm"}.yml`;
  for (const file of files) {
    const digest = crypto.createHash("sha256").update(fs.readFileSync(file)).digest("hex");
    const record = { digest, workflow, commit: process.env.GITHUB_SHA };
    fs.appendFileSync(process.env.ACT_ATTESTATIONS, JSON.stringify(record) + "\n");
    core.info(`attested ${file}`);
  }
}

run().catch((error) => core.setFailed(error.message));
