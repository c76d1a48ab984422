const { execFileSync } = require("child_process");
const fs = require("fs");
const core = require("@actions/core");

function git(...words) {
  return execFileSync("git", ["-c", "safe.directory=*", "-C", process.env.GITHUB_WORKSPACE, ...words], { encoding: "utf8" });
}

try {
  fs.mkdirSync(process.env.GITHUB_WORKSPACE, { recursive: true });
  git("init", "--quiet");
  git("fetch", "--quiet", process.env.ACT_REPOSITORY, "+refs/*:refs/act/*");
  git("checkout", "--quiet", "--force", "--detach", core.getInput("ref") || process.env.GITHUB_SHA);
  core.info(git("log", "-1", "--oneline").trim());
} catch (error) {
  core.setFailed(error.message);
}
