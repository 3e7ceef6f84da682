"""The command `shardwise completion`."""

from argparse import ArgumentParser, Namespace

from shardwise.commands.command import Command


def run(args: Namespace) -> int:
    """Print the code that makes a shell ask `shardwise` for completions."""
    from argcomplete import shellcode

    print(shellcode(["shardwise"], shell=args.shell))
    return 0


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that runs it")


COMMAND = Command(
    "completion",
    'Print the code that completes commands in a shell. For bash and zsh: eval "$(shardwise '
    'completion bash)"; for fish: shardwise completion fish | source.',
    _add_arguments,
    run,
)
