# shellcheck shell=bash
# Finds or makes the Python environment of titanlite. Sourced by run_llama_train.sh and run_tests.sh:
#
#     source scripts/setup_env.sh
#     setup_env run      # what training needs
#     setup_env dev      # and what the tests need
#
# Afterwards $TITANLITE_PYTHON is the interpreter to use and PATH begins with its folder. In this order:
#   1. an active environment ($VIRTUAL_ENV, $CONDA_PREFIX) that has titanlite installed;
#   2. .venv beside this repository's pyproject.toml, when its stamp says that it is complete and up to date;
#   3. the `python` or `python3` on PATH, when titanlite is installed there (a container image, say);
#   4. .venv, made or brought up to date with pip under constraints.txt.
# The stamp is written last and holds the inputs themselves, so that comparing it takes milliseconds and no Python.
# It runs under bash 3.2 too (macOS).

TITANLITE_ROOT="${TITANLITE_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"
TITANLITE_VENV="$TITANLITE_ROOT/.venv"
_STAMP="$TITANLITE_VENV/titanlite.stamp"
# Says that setup_env made this .venv, which may therefore be emptied when its installation was cut short.
_OURS="$TITANLITE_VENV/titanlite.made-by-setup"
_LOG="$TITANLITE_VENV/install.log"
_NEEDED="3.10 to 3.13"

_say() { printf 'titanlite: %s\n' "$*" >&2; }

_die() {
    printf '\ntitanlite: cannot set up the environment: %s\n' "$1" >&2
    shift
    local line
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit 1
}

# The text a complete environment is stamped with: what was installed ($1: run or dev), where, for which Python, and
# the inputs.
_stamp_text() {
    printf 'extras: %s\nroot: %s\npython: %s\n' "$1" "$TITANLITE_ROOT" "$(_venv_version)"
    cat "$TITANLITE_ROOT/pyproject.toml" "$TITANLITE_ROOT/constraints.txt"
}

# major.minor of .venv, read from its own record without starting it.
_venv_version() {
    sed -n 's/^version\(_info\)\{0,1\} *= *\([0-9]*\.[0-9]*\).*/\2/p' "$TITANLITE_VENV/pyvenv.cfg" 2>/dev/null | head -n 1
}

# .venv holds at least what $1 (run or dev) asks for, installed from the inputs as they are now, for an explicit
# PYTHON's version where there is one.
_venv_is_ready() {
    [ -x "$TITANLITE_VENV/bin/python" ] && [ -f "$_STAMP" ] || return 1
    [ -z "$_BASE_VERSION" ] || [ "$_BASE_VERSION" = "$(_venv_version)" ] || return 1
    _stamp_text dev | cmp -s - "$_STAMP" && return 0
    [ "$1" = run ] && _stamp_text run | cmp -s - "$_STAMP"
}

# Prints which modules that $2 (run or dev) needs are missing from the interpreter $1; "titanlite" among them where
# it is not installed. From / because a source tree in the working directory is not an installation.
_missing_modules() {
    local modules="titanlite torch torchao datasets numpy pydantic tiktoken sentencepiece rich tensorboard"
    [ "$2" = dev ] && modules="$modules pytest ruff mypy hypothesis pyte transformers tokenizers matplotlib s3fs moto flask_cors"
    # shellcheck disable=SC2086  # the module names are separate words
    (cd / && "$1" -c '
import importlib.util, sys
print(" ".join(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
' $modules) 2>/dev/null || echo "titanlite"
}

_use() {
    TITANLITE_PYTHON="$1"
    export TITANLITE_PYTHON
    PATH="$(dirname "$1"):$PATH"
    export PATH
}

# Uses the interpreter $1 if titanlite and all that $2 needs is installed there. $3 describes it.
_use_if_installed() {
    local missing
    missing="$(_missing_modules "$1" "$2")"
    case " $missing " in
        "  ")
            _say "using $3 ($1)"
            _use "$1"
            return 0
            ;;
        *" titanlite "*) return 1 ;;
    esac
    _say "$3 has titanlite but not: $missing. Using .venv instead;"
    _say "to use yours: pip install -c constraints.txt -e '.[dev]' in it"
    return 1
}

# "3.11 ok" for the interpreter $1; "3.11 no-venv" where venv or ensurepip is missing; nothing where it does not run.
_probe() {
    "$1" -c '
import sys
try:
    import ensurepip, venv
    state = "ok"
except ImportError:
    state = "no-venv"
print("%d.%d %s" % (sys.version_info[0], sys.version_info[1], state))
' </dev/null 2>/dev/null || true
}

_version_fits() { case "$1" in 3.10 | 3.11 | 3.12 | 3.13) return 0 ;; *) return 1 ;; esac }

# Sets _BASE_PYTHON to the interpreter that .venv is made with.
_find_base_python() {
    local candidates="python3 python python3.13 python3.12 python3.11 python3.10"
    [ -n "${PYTHON:-}" ] && candidates="$PYTHON"
    local found="" without_venv="" candidate probe version
    for candidate in $candidates; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        probe="$(_probe "$candidate")"
        [ -n "$probe" ] || continue
        version="${probe% *}"
        found="$found${found:+, }$candidate is $version"
        _version_fits "$version" || continue
        if [ "${probe#* }" = ok ]; then
            _BASE_PYTHON="$candidate"
            _BASE_VERSION="$version"
            return 0
        fi
        without_venv="$without_venv${without_venv:+ }$version"
    done
    if [ -n "$without_venv" ]; then
        version="${without_venv%% *}"
        _die "Python $version is here, but it cannot make virtual environments." \
            "Debian and Ubuntu keep that part in a package of its own: sudo apt install python$version-venv" \
            "Or name another interpreter: PYTHON=/path/to/python3 $0"
    fi
    _die "no usable Python: needed is $_NEEDED, found: ${found:-none that runs (looked for $candidates)}." \
        "Install one of them, or name it: PYTHON=/path/to/python3.12 $0"
}

# While $1 (a process) lives: what pip is doing, in place on a terminal and every 20 seconds otherwise.
_report_progress() {
    local seconds=0 last
    while sleep 1 >/dev/null 2>&1 && kill -0 "$1" 2>/dev/null; do
        seconds=$((seconds + 1))
        last="$(grep -E '^ *(Collecting|Downloading|Using cached|Building|Installing|Successfully)' "$_LOG" 2>/dev/null | tail -n 1 | cut -c 1-90)"
        if [ -t 2 ]; then
            printf '\r\033[K  %4d s  %s' "$seconds" "$last" >&2
        elif [ $((seconds % 20)) -eq 0 ]; then
            printf '  %4d s  %s\n' "$seconds" "$last" >&2
        fi
    done
}

# Runs a command with its output in the log; when it fails, shows what it said. $1 says what failed.
_logged() {
    local what="$1" status=0 reporter
    shift
    printf '\n$ %s\n' "$*" >>"$_LOG"
    local start
    start=$(($(wc -l <"$_LOG") + 1))
    _report_progress "${BASHPID:-$$}" 9>&- &
    reporter=$!
    # shellcheck disable=SC2064  # the process known now
    trap "kill $reporter 2>/dev/null; _release_lock" EXIT
    "$@" >>"$_LOG" 2>&1 </dev/null || status=$?
    kill "$reporter" 2>/dev/null
    wait "$reporter" 2>/dev/null
    trap _release_lock EXIT
    [ -t 2 ] && printf '\r\033[K' >&2
    [ "$status" -eq 0 ] && return 0
    {
        printf '\n'
        tail -n "+$start" "$_LOG" | tail -n 40
    } >&2
    _die "$what failed (exit code $status)." \
        "All that was said: $_LOG" \
        "If the network was the reason, run the same command again: it starts over cleanly." \
        "A proxy or a package mirror is taken from pip's own settings (pip config list, PIP_INDEX_URL)."
}

# One installation at a time; a second run waits, then finds the work done.
_take_lock() {
    mkdir -p "$TITANLITE_VENV" || _die "cannot write to $TITANLITE_ROOT" "Make .venv a link to a folder that you may write to."
    _LOCK_FOLDER=""
    if command -v flock >/dev/null 2>&1; then
        exec 9>>"$TITANLITE_VENV/titanlite.lock"
        if ! flock -n 9; then
            _say "another run is installing into .venv; waiting for it"
            flock 9
        fi
        return
    fi
    local holder waiting=""
    while ! mkdir "$TITANLITE_VENV/titanlite.lock.d" 2>/dev/null; do
        holder="$(cat "$TITANLITE_VENV/titanlite.lock.d/pid" 2>/dev/null)"
        if [ -n "$holder" ] && ! kill -0 "$holder" 2>/dev/null; then
            rm -rf "$TITANLITE_VENV/titanlite.lock.d"
            continue
        fi
        [ -n "$waiting" ] || _say "another run${holder:+ (process $holder)} is installing into .venv; waiting for it"
        waiting=yes
        sleep 1
    done
    _LOCK_FOLDER="$TITANLITE_VENV/titanlite.lock.d"
    echo $$ >"$_LOCK_FOLDER/pid"
}

_release_lock() {
    [ -n "${_LOCK_FOLDER:-}" ] && rm -rf "$_LOCK_FOLDER"
    _LOCK_FOLDER=""
    exec 9>&-
}

_empty_venv() {
    find "$TITANLITE_VENV/" -mindepth 1 -maxdepth 1 ! -name 'titanlite.lock*' -exec rm -rf {} +
}

# Empties .venv before _install where updating it in place would not do; the reason is $1.
_start_over() {
    if [ -f "$_OURS" ]; then
        _say "$1; making .venv anew"
        _empty_venv
    else
        _die "$1, and .venv was not made by this script." "Remove it (rm -r $TITANLITE_VENV), or activate an environment that has titanlite."
    fi
}

_install() {
    local extras="$1" what="." began=$SECONDS version python="$TITANLITE_VENV/bin/python"
    # What the tests need stays, once it is there.
    grep -q '^extras: dev$' "$_STAMP" 2>/dev/null && extras=dev
    [ "$extras" = dev ] && what=".[dev]"
    version="$(_venv_version)"
    if [ -f "$_OURS" ] && [ ! -f "$_STAMP" ]; then
        _start_over "the last installation did not finish"
    elif [ -n "$version" ] && { ! _version_fits "$version" || [ ! -x "$python" ]; }; then
        _start_over ".venv is for Python $version, which is gone or not supported (needed: $_NEEDED)"
    elif [ -n "$version" ] && [ -n "$_BASE_VERSION" ] && [ "$version" != "$_BASE_VERSION" ]; then
        _start_over ".venv is for Python $version and PYTHON=$PYTHON is $_BASE_VERSION"
    fi
    # An update that is cut short must not pass for done.
    rm -f "$_STAMP"
    if [ -x "$python" ]; then
        _say "bringing .venv up to date (log: .venv/install.log)"
        : >"$_LOG"
        "$python" -m pip --version >>"$_LOG" 2>&1 || _logged "adding pip to .venv" "$python" -m ensurepip
    else
        [ -n "$_BASE_PYTHON" ] || _find_base_python
        _say "making .venv with $_BASE_PYTHON ($_BASE_VERSION); once, some minutes (log: .venv/install.log)"
        : >"$_OURS"
        : >"$_LOG"
        _logged "making the virtual environment" "$_BASE_PYTHON" -m venv "$TITANLITE_VENV"
    fi
    cd "$TITANLITE_ROOT" || exit 1
    # A user-wide `pip --user` setting cannot work in a virtual environment.
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0
    _say "[1/3] the build tool"
    _logged "installing setuptools" "$python" -m pip install --progress-bar off -c constraints.txt setuptools
    _say "[2/3] titanlite and what it needs (torch is the large one)"
    # Without isolation the build uses the pinned setuptools and asks no package index a second time.
    _logged "installing titanlite" "$python" -m pip install --progress-bar off -c constraints.txt --no-build-isolation -e "$what"
    _say "[3/3] a first import"
    _logged "importing torch and titanlite" "$python" -c 'import titanlite, torch; print(torch.__version__)'
    _stamp_text "$extras" >"$_STAMP.new"
    mv "$_STAMP.new" "$_STAMP"
    _say "ready after $((SECONDS - began)) s"
}

# An active environment other than .venv itself, or nothing.
_active_python() {
    local prefix
    for prefix in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
        if [ -n "$prefix" ] && [ -x "$prefix/bin/python" ] && ! [ "$prefix" -ef "$TITANLITE_VENV" ]; then
            echo "$prefix/bin/python"
            return
        fi
    done
}

# setup_env run|dev: see the head of this file. Ends the script with 1 when there is no way.
setup_env() {
    local extras="$1" active candidate
    _BASE_PYTHON="" _BASE_VERSION=""
    # .venv may be the active environment: it must not be asked whether, or be the base from which, it is to be made.
    PATH="${PATH//$TITANLITE_VENV\/bin:/}"
    active="$(_active_python)"
    if [ -n "$active" ] && _use_if_installed "$active" "$extras" "the active environment"; then return 0; fi
    # An explicit PYTHON is a wish about .venv: one of another version is replaced.
    [ -n "${PYTHON:-}" ] && _find_base_python
    if _venv_is_ready "$extras"; then
        _use "$TITANLITE_VENV/bin/python"
        return 0
    fi
    if [ -z "${PYTHON:-}" ]; then
        for candidate in python python3; do
            candidate="$(command -v "$candidate" 2>/dev/null)" || continue
            if _use_if_installed "$candidate" "$extras" "the Python on PATH"; then return 0; fi
        done
    fi
    # In a shell of its own, so that its settings and its lock end with it.
    (
        trap _release_lock EXIT
        trap 'exit 130' INT
        trap 'exit 143' TERM
        _take_lock
        # The run that held the lock may have done the work.
        _venv_is_ready "$extras" || _install "$extras"
    ) || exit $?
    _use "$TITANLITE_VENV/bin/python"
}
