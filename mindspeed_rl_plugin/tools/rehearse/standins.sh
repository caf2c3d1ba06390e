# Every bash reads this file before a script (BASH_ENV). capture.py puts lines before these, which set variables.
# A launch is recorded and not made, whatever path its launcher has and wherever its output goes. Commands that delete,
# copy, kill, log in or install are listed and not run. But rm, rmdir, mkdir, touch, cp and mv run if all their paths
# are in the script's own folder, which the rehearsal made.

rehearse_wrappers=" exec nohup time env numactl taskset nice timeout stdbuf setsid "
rehearse_word="([^[:space:]\"'\\\\<>]|\\\\.|'[^']*'|\"([^\"\\\\]|\\\\.)*\")*"

rehearse_launch() { # the words after torchrun, or after the module
    "$rehearse_python" -IS -c 'import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}))' "$@" >> "$rehearse_record/launches"
}

rehearse_owned() { # whether all paths are in the script's own folder; no for options that may name a path, such as cp -t
    local word paths=0
    for word in "$@"; do
        case "$word" in
            -- ) ;;
            -*[!-rRfpva]*) return 1 ;;
            -*) ;;
            *) paths=1; [[ "$(realpath -m -- "$word")" == "$rehearse_own"/* ]] || return 1 ;;
        esac
    done
    [ "$paths" = 1 ]
}

rehearse_skip() { # $1: name of a command; then its arguments
    case "$1" in
        rm | rmdir | mkdir | touch | cp | mv)
            if rehearse_owned "${@:2}"; then PATH="$rehearse_path" command "$@"; return; fi ;;
    esac
    local words; printf -v words '%q ' "$@"
    printf '%s\n' "${words% }" >> "$rehearse_record/skipped"
}

# $1: a simple command as bash prints it, redirections last; then the script's own arguments, which the command may use.
# Returns 1 if the command was recorded: bash then does not run it.
rehearse_command() {
    shopt -s extdebug # so that 1 skips the command; not set earlier, since bash would look for its debugger at start
    local rehearse_text="$1" rehearse_set="" rehearse_name rehearse_i
    local -a rehearse_words
    shift
    while [[ "$rehearse_text" =~ ^([A-Za-z_][A-Za-z_0-9]*=$rehearse_word)[[:space:]]+(.*) ]]; do
        rehearse_set+="${BASH_REMATCH[1]} " rehearse_text="${BASH_REMATCH[4]}"
    done
    [[ "$rehearse_text" =~ ^$rehearse_word ]]
    rehearse_name="${BASH_REMATCH[0]}"
    case "$rehearse_name" in [A-Za-z_]*=* | *'('* | *'`'*) return 0 ;; esac # only an assignment; a name whose evaluation could run a command
    eval "rehearse_name=$rehearse_name" 2> /dev/null || return 0
    rehearse_name="${rehearse_name%% *}" rehearse_name="${rehearse_name##*/}"
    case "$rehearse_name: $rehearse_text" in
        "kill: kill -0 "*) return 0 ;;
        torchrun:* | python*:*torch.distributed.*) ;;
        *) [[ "$rehearse_names$rehearse_wrappers" == *" $rehearse_name "* ]] || return 0 ;;
    esac

    [[ "$rehearse_text" =~ ^($rehearse_word[[:space:]]*)* ]]
    if [ "${BASH_REMATCH[0]}" != "$rehearse_text" ]; then rehearse_text="${BASH_REMATCH[0]% *}"; fi
    eval "rehearse_words=($rehearse_text)" || return 0
    local IFS=' '
    for ((rehearse_i = 0; rehearse_i < ${#rehearse_words[@]}; rehearse_i++)); do
        case "${rehearse_words[rehearse_i]##*/} ${rehearse_words[*]:rehearse_i+1:2}" in
            torchrun\ *) rehearse_i=$((rehearse_i + 1)) ;;
            python*\ -m\ torch.distributed.run | python*\ -m\ torch.distributed.launch) rehearse_i=$((rehearse_i + 3)) ;;
            *) if [[ "$rehearse_wrappers" == *" $rehearse_name "* ]]; then continue; else break; fi ;;
        esac
        eval "$rehearse_set rehearse_launch \"\${rehearse_words[@]:rehearse_i}\""
        return 1
    done
    [[ "$rehearse_names" == *" $rehearse_name "* ]] || return 0
    rehearse_skip "$rehearse_name" "${rehearse_words[@]:1}"
    return 1
}

source() {
    if [ -e "$1" ] || command -v -- "$1" > /dev/null; then builtin source "$@"; else echo "$1" >> "$rehearse_record/missing"; fi
}
cd() {
    if [ $# -ne 1 ] || [ "$1" = - ] || [ -d "$1" ]; then builtin cd "$@"; return; fi
    echo "$1" >> "$rehearse_record/missing" && builtin cd "$(mktemp -d "$rehearse_own/cd.XXXXXX")"
}
tee() { cat; }

rehearse_by_name() { # for programs other than bash, which find a stand-in through PATH. $1: its name; then its arguments
    case "$1 ${2-} ${3-}" in
        tee*) exec cat ;;
        torchrun*) rehearse_launch "${@:2}" ;;
        python*" -m torch.distributed.run" | python*" -m torch.distributed.launch") rehearse_launch "${@:4}" ;;
        python*) exec "$rehearse_python" "${@:2}" ;;
        *) rehearse_skip "$@" ;;
    esac
}

set -o functrace
trap 'rehearse_command "$BASH_COMMAND" "$@" || ! :' DEBUG
