"""SGLang's HTTP server in a fork of this process, and requests to it as its users write them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_models

PATIENCE = 300  # seconds
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _written_tokenizer(folder: Path) -> Any:
    """A letter a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words += [chr(0x100 + i) for i in range(tiny_models.VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **named)
    made.save_pretrained(folder)
    return made


def _serve(words: list[str]) -> None:
    os.setsid()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(words))


class Server:
    """`python -m sglang.launch_server` with these arguments, by their Python names."""

    def __init__(self, **arguments: Any) -> None:
        """Returns when the server answers. Raises RuntimeError where it does not."""
        self._tokenizer = _written_tokenizer(Path(arguments["model_path"]))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        words = ["--port", str(port)]
        for name, value in arguments.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(words,))
        self._process.start()
        begin = time.monotonic()
        while not self._answers():
            if not self._process.is_alive() or time.monotonic() - begin > PATIENCE:
                self.shutdown()
                raise RuntimeError("the server did not start")
            time.sleep(1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    def generate(self, **body: Any) -> Any:
        return self._post("/generate", body)

    def chat(self, prompt: Sequence[int], model: Any) -> float:
        """The largest difference of a log probability of a chat's answer to a model of transformers'."""
        content = "".join(self._tokenizer.convert_ids_to_tokens(prompt))
        answer = self._post("/v1/chat/completions", {
            "model": "model", "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": tiny_models.TOKENS, "ignore_eos": True, "logprobs": True, "top_logprobs": 20,
        })  # fmt: skip
        rows = answer["choices"][0]["logprobs"]["content"]
        tokens = self._tokenizer.convert_tokens_to_ids([row["token"] for row in rows])
        assert self._tokenizer.decode(tokens) == answer["choices"][0]["message"]["content"]
        assert len(tokens) == tiny_models.TOKENS
        expected = tiny_models.log_probabilities(model, [self._tokenizer.bos_token_id, *prompt], tokens)
        result = []
        for values, row in zip(expected, rows, strict=True):
            assert len(row["top_logprobs"]) == 20
            for each in row["top_logprobs"]:
                token = self._tokenizer.convert_tokens_to_ids(each["token"])
                result.append(abs(float(values[token]) - each["logprob"]))
        return max(result)

    def shutdown(self) -> None:
        for kill in (signal.SIGTERM, signal.SIGKILL):
            if self._process.is_alive():
                os.killpg(self._process.pid, kill)  # type: ignore[arg-type]
                self._process.join(30)
