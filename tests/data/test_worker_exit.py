import contextlib
import os
import signal
import subprocess
import sys

from tests.distributed import PATIENCE

SCRIPT = """
import sys
from transformers import PreTrainedTokenizerFast
from shardwise.config import Data, Model, RunConfig, Training
from shardwise.data.loader import build_loaders

if __name__ == "__main__":
    tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
    # a batch takes threads; in a process forked from here tokenizers would warn of them
    tokenizer(["the text"] * 100)
    data = Data(train=sys.argv[2], sequence_length=8, workers=2)
    cfg = RunConfig(Model("unused"), data, Training("unused"))
    loaders = build_loaders(cfg, tokenizer, range(8))
    next(loaders.train)
    print("running", flush=True)
    sys.stdin.read()
"""


def test_workers_end_with_the_process_that_reads_them(tmp_path, tokenizer, write_corpus):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        str(tmp_path / "script.py"),
        str(tmp_path),
        write_corpus(["the text " * 100]),
    ]
    pipe = subprocess.PIPE
    returning, killed = processes = [
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        for _ in range(2)
    ]
    try:
        assert [process.stdout.readline() for process in processes if process.stdout] == [
            "running\n"
        ] * 2
        killed.kill()
        # communicate returns when no process holds the pipes any more: neither a worker nor the
        # fork server.
        assert returning.communicate(timeout=PATIENCE) == ("", "")
        killed.communicate(timeout=PATIENCE)
        assert (returning.returncode, killed.returncode) == (0, -signal.SIGKILL)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
