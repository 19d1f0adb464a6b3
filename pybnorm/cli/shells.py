"""Answers bash, zsh and fish, which ask for completions.

click's own scripts hand over the words that the shell has made of a line. Bash ends words at ``=`` and ``:`` and so
makes several of a case, and fish is given what stands before the first comma of an answer. Here every shell hands over
the line up to the cursor, and one function makes words of it.
"""

from __future__ import annotations

import os

from click.shell_completion import CompletionItem, ShellComplete, add_completion_class, split_arg_string

_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' item
    COMPREPLY=()
    for item in $(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \
        %(complete_var)s=bash_complete "$1"); do
        case $item in
            file,*) compopt -o default ;;
            *) COMPREPLY+=("${item#*,}") ;;
        esac
    done
    if [[ ${COMPREPLY[*]} == *[=,] ]]; then compopt -o nospace; fi
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
_ZSH = """\
#compdef %(prog_name)s
%(complete_func)s() {
    local item
    local -a whole begun
    for item in "${(@f)$(COMP_LINE="${words[1,CURRENT-1]} $PREFIX" %(complete_var)s=zsh_complete %(prog_name)s)}"; do
        case $item in
            file,*) _files ;;
            *[=,]) begun+=("${item#*,}") ;;
            ?*) whole+=("${item#*,}") ;;
        esac
    done
    (( $#whole )) && compadd -V unsorted -a whole
    (( $#begun )) && compadd -V unsorted -S '' -a begun
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""
_FISH = """\
function %(complete_func)s
    for item in (env %(complete_var)s=fish_complete COMP_LINE=(commandline -cp | string collect) %(prog_name)s)
        set -l parts (string split -m 1 , -- $item)
        if test $parts[1] = file
            __fish_complete_path $parts[2]
        else
            echo $parts[2]
        end
    end
end
complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""


class _OfALine(ShellComplete):
    typed = ""
    """The word that is completed."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the cursor's, and that one."""
        line = os.environ.get("COMP_LINE", "")
        words = split_arg_string(line)
        if words and not line[-1].isspace():
            self.typed = words.pop()
        return words[1:], self.typed

    def format_completion(self, item: CompletionItem) -> str:
        """Write its type and its value, as the whole word."""
        option, equals, _ = self.typed.partition("=")
        whole = item.value
        if self.typed.startswith("--") and equals:  # click completes what stands behind the sign
            whole = f"{option}={item.value}"
        return f"{item.type},{whole}"


@add_completion_class
class _Bash(_OfALine):
    name = "bash"
    source_template = _BASH

    def format_completion(self, item: CompletionItem) -> str:
        """Write what replaces the last of the words that bash sees; a quoted word is one of them."""
        kind, _, whole = super().format_completion(item).partition(",")
        last = os.environ.get("COMP_LINE", "").rpartition(" ")[2]
        ends = [sign for sign in "=:" if sign in os.environ.get("COMP_WORDBREAKS", "=:")]
        seen = 0 if {"'", '"'} & set(last) else max((self.typed.rfind(sign) + 1 for sign in ends), default=0)
        return f"{kind},{whole[seen:]}"


@add_completion_class
class _Zsh(_OfALine):
    name = "zsh"
    source_template = _ZSH


@add_completion_class
class _Fish(_OfALine):
    name = "fish"
    source_template = _FISH
