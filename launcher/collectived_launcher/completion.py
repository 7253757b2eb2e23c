"""`collectived completion`: what makes a shell complete the commands and options of `collectived`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
_PROGRAM, _VARIABLE = "collectived", "_COLLECTIVED_COMPLETE"
_ZSH_NOTE = "zsh reads it if ~/.zshrc has `fpath+=({folder})` before `autoload -Uz compinit && compinit`"


@click.command(short_help="Print or install what completes commands in your shell.")
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.option("--install", is_flag=True, help="Write the script to the file from which the shell loads it.")
def completion(shell: str | None, install: bool) -> None:
    """Print the script that completes commands and options in a SHELL: bash, zsh or fish.

    Without SHELL, the script is for the shell that SHELL in the environment names.
    """
    chosen = shell or find_shell(os.environ)
    script = make_script(chosen, click.get_current_context().find_root().command)
    if not install:
        click.echo(script)
        return
    path = find_file(chosen, os.environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    click.echo(f"{path}: start a new {chosen} to use it")
    if chosen == "zsh":
        click.echo(_ZSH_NOTE.format(folder=path.parent))


def find_shell(environment: Mapping[str, str]) -> str:
    """The shell of this user.

    Raises:
        click.UsageError: it is none of those that are known.
    """
    path = environment.get("SHELL", "")
    name = Path(path).name
    if name not in SHELLS:
        told = f"SHELL is {path!r}" if path else "SHELL is not set"
        raise click.UsageError(f"{told}; name one of {', '.join(SHELLS)}: collectived completion bash")
    return name


def find_file(shell: str, environment: Mapping[str, str]) -> Path:
    """Where this user's shell looks for scripts."""
    home = Path(environment.get("HOME") or Path.home())
    data = Path(environment.get("XDG_DATA_HOME") or home / ".local/share")
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    return {
        "bash": data / "bash-completion/completions" / _PROGRAM,
        "zsh": data / "zsh/site-functions" / f"_{_PROGRAM}",
        "fish": config / "fish/completions" / f"{_PROGRAM}.fish",
    }[shell]


def make_script(shell: str, command: click.Command) -> str:
    """The script of click, which asks the command itself for what can follow."""
    kind = get_completion_class(shell)
    assert kind is not None, f"click has no completion for {shell}"
    return kind(command, {}, _PROGRAM, _VARIABLE).source()
