"""``trireme completion SHELL``: the script with which a shell completes command lines of ``trireme``. Hydra's own flag does the same:
``-sc install=SHELL`` prints the script, ``-sc uninstall=SHELL`` the command that undoes it, ``-sc query=SHELL`` the words for the line in
``COMP_LINE``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from launcher.cli.main import SHELL_COMPLETION
from launcher.cli.parser import VerbParser
from trainer.shared.run.errors import ConfigError, listed

DESCRIPTION = """\
Prints a script with which the shell completes verbs, options, keys, groups, their values, and names of sweeps and trials.

examples:
  eval "$(trireme completion bash)"   in ~/.bashrc
  eval "$(trireme completion zsh)"   in ~/.zshrc, after compinit
  trireme completion fish | source   in ~/.config/fish/config.fish
"""
BASH = r"""
_trireme() {
    local line=${COMP_LINE:0:COMP_POINT} cut= found IFS=$'\n'
    local word=${line##*[[:space:]]}
    [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] && cut=${word%"${word##*=}"}
    [[ $COMP_WORDBREAKS == *:* && $word == *:* ]] && cut=${word%"${word##*[=:]}"}
    COMPREPLY=()
    while read -r found; do
        COMPREPLY+=("${found#"$cut"}")
    done < <("${COMP_WORDS[0]}" completion --line "$line" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
    return 0
}
complete -o bashdefault -o default -F _trireme trireme
"""
ZSH = r"""
_trireme() {
    local -a found whole open
    found=("${(@f)$(${words[1]} completion --line "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    whole=("${(@)found:#*[=.]}") open=("${(@M)found:#*[=.]}")
    (( ${#${(j::)found}} )) || { _files; return }
    compadd -a whole
    compadd -S '' -a open
}
compdef _trireme trireme
"""
FISH = r"""
function __trireme_words
    set -l words (commandline --current-process --cut-at-cursor --tokenize)
    command $words[1] completion --line (commandline --current-process --cut-at-cursor | string collect) 2>/dev/null
end
complete --command trireme --arguments '(__trireme_words)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
UNDONE = {"bash": "complete -r trireme", "zsh": "compdef -d trireme", "fish": "complete --command trireme --erase"}


def main(argv: list[str]) -> int:
    """Prints a script, or with ``--line`` the candidates for the last word of a line, one each line; nothing if it cannot tell them."""
    arguments = parser().parse_args(argv)
    if arguments.line is not None:
        return answer(arguments.line)
    if arguments.shell is None:
        raise ConfigError(f"'trireme completion' needs a shell: {listed(SCRIPTS)}")
    print(SCRIPTS[arguments.shell].strip())
    return 0


def parser() -> VerbParser:
    made = VerbParser("trireme completion", DESCRIPTION)
    made.add_argument("shell", nargs="?", choices=[*SCRIPTS], help="bash, zsh or fish")
    made.add_argument("--line", help=argparse.SUPPRESS)
    return made


def answer(line: str) -> int:
    """Prints the candidates. Whatever is wrong stays unsaid: a message would appear within the line that a person types."""
    from launcher.cli.candidates import candidates

    try:
        found = candidates(line)
    except Exception:
        return 1
    sys.stdout.write("".join(f"{word}\n" for word in found))
    return 0


def as_hydra(argv: Sequence[str]) -> int:
    """Answers a command line with Hydra's flag. Raises ``ConfigError`` for an action or a shell that does not exist."""
    place = next(index for index, word in enumerate(argv) if word.partition("=")[0] in SHELL_COMPLETION)
    said = argv[place].partition("=")[2] or next(iter(argv[place + 1 :]), "")
    action, _, shell = said.partition("=")
    if action not in ("install", "uninstall", "query") or shell not in SCRIPTS:
        raise ConfigError(f"{argv[place]} {said}".strip() + f": give install=SHELL, uninstall=SHELL or query=SHELL, of {listed(SCRIPTS)}")
    if action == "query":
        line = os.environ.get("COMP_LINE", "")
        return answer(line[: int(os.environ.get("COMP_POINT") or len(line))])
    print((SCRIPTS if action == "install" else UNDONE)[shell].strip())
    return 0
