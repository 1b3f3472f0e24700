# shellcheck shell=bash
# `setup_env run` (for training) or `setup_env dev` (for the tests, too) sets $TITANLITE_PYTHON to the first of
#   1. the active environment ($VIRTUAL_ENV, $CONDA_PREFIX), if titanlite is installed there;
#   2. .venv in this repository, if its stamp says that it is complete and up to date (no Python is started for that);
#   3. `python` or `python3` on PATH, if titanlite is installed there (a container image);
#   4. .venv, made or updated under constraints.txt by uv, or by pip where uv cannot be used;
# and puts its folder at the head of PATH. To be sourced; bash 3.2 (macOS) is enough.

TITANLITE_ROOT="${TITANLITE_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"
_VENV="$TITANLITE_ROOT/.venv"
# Holds the inputs of a complete installation, or "unfinished". A .venv without a stamp was made by somebody else.
_STAMP="$_VENV/titanlite.stamp"
_RUN_MODULES="titanlite torch torchao numpy msgspec safetensors xxhash tiktoken sentencepiece tensorboard jinja2 datasets huggingface_hub aiohttp tokenizers zstandard"
_DEV_MODULES="pytest xdist ruff mypy hypothesis pyte transformers wandb mlflow comet_ml trackio s3fs moto flask_cors kubeflow kubeflow_trainer_api kubernetes yamllint"

_say() { printf 'titanlite: %s\n' "$@" >&2; }
_die() { _say "cannot set up the environment: $1" "${@:2}"; exit 1; }
_use() { export TITANLITE_PYTHON="$1" PATH="${1%/*}:$PATH"; }

# Uses the interpreter $1 if it has titanlite and all that $2 (run or dev) needs.
_use_if_installed() {
    local missing modules="$_RUN_MODULES"
    [ "$2" = run ] || modules="$modules $_DEV_MODULES"
    # From /: a source tree in the working directory is not an installation.
    # shellcheck disable=SC2086  # the module names are separate words
    missing="$(cd / && "$1" -c 'import sys; from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))' $modules 2>/dev/null)" || return 1
    case " $missing " in *" titanlite "*) return 1 ;; esac
    if [ -n "$missing" ]; then
        _say "$1 has titanlite, but lacks $missing. Using .venv instead;" "to use yours: pip install -c constraints.txt -e '.[dev]'"
        return 1
    fi
    _say "using $1"
    _use "$1"
}

# Sets _BASE and _BASE_VERSION: the interpreter that .venv is made with.
_find_base() {
    local candidate answer found="" bare=""
    set -- python3 python python3.13 python3.12 python3.11 python3.10
    [ -z "${PYTHON:-}" ] || set -- "$PYTHON"
    for candidate in "$@"; do
        answer="$("$candidate" -c 'import sys
state = "fits" if (3, 10) <= sys.version_info < (3, 14) else "other"
try: import ensurepip, venv
except ImportError: state = state.replace("fits", "bare")
print("%d.%d %s" % (sys.version_info[0], sys.version_info[1], state))' 2>/dev/null </dev/null)" || continue
        case "$answer" in
            *fits) _BASE="$candidate" _BASE_VERSION="${answer% *}"; return ;;
            *bare) bare="${bare:-${answer% *}}" ;;
        esac
        found="$found${found:+, }$candidate is ${answer% *}"
    done
    [ -z "$bare" ] || _die "Python $bare cannot make virtual environments here." \
        "On Debian and Ubuntu: sudo apt install python$bare-venv. Or name another one: PYTHON=/path/to/python3 $0"
    _die "it needs Python 3.10 to 3.13; found: ${found:-none (looked for $*)}." \
        "Install one, or name it: PYTHON=/path/to/python3.12 $0"
}

_venv_version() { sed -n 's/^version[_info]* *= *\([0-9]*\.[0-9]*\).*/\1/p' "$_VENV/pyvenv.cfg" 2>/dev/null; }
_stamp_text() {
    printf 'extras: %s\nroot: %s\n' "$1" "$TITANLITE_ROOT"
    cat "$TITANLITE_ROOT/pyproject.toml" "$TITANLITE_ROOT/constraints.txt"
}

# .venv has what $1 (run or dev) needs, for the version of an explicit PYTHON.
_is_ready() {
    [ -x "$_VENV/bin/python" ] && [ -f "$_STAMP" ] || return 1
    [ -z "$_BASE" ] || [ "$_BASE_VERSION" = "$(_venv_version)" ] || return 1
    _stamp_text dev | cmp -s - "$_STAMP" || { [ "$1" = run ] && _stamp_text run | cmp -s - "$_STAMP"; }
}

# One set-up at a time: waits until this shell holds the lock, which ends with it. Python, as macOS has no flock command.
_lock() {
    mkdir -p "$_VENV" && exec 9>>"$_VENV/titanlite.lock" || _die "cannot write to $_VENV" "It may be a link to another folder."
    "$1" -c 'import fcntl, sys
try: fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("titanlite: another run is setting up .venv; waiting for it", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)' || _say "this file system has no locks: start no second set-up now"
}

# Hands pip's settings (a mirror, local wheels), which uv does not read, to uv. $1: the interpreter whose pip is asked.
_pip_settings_for_uv() {
    local settings pair name value
    settings="$("$1" -m pip config list 2>/dev/null)"
    for pair in index-url:UV_INDEX_URL extra-index-url:UV_EXTRA_INDEX_URL find-links:UV_FIND_LINKS \
        no-index:UV_NO_INDEX trusted-host:UV_INSECURE_HOST cert:SSL_CERT_FILE; do
        name="${pair#*:}"
        value="$(printf '%s\n' "$settings" | sed -n "s/^[^=]*\.${pair%:*}='\(.*\)'\$/\1/p" | sed 's/\\n/ /g; s/^ *//; q')"
        [ "$name" != UV_FIND_LINKS ] || value="${value// /,}"
        [ -z "$value" ] || [ -n "${!name:-}" ] || export "$name=$value"
    done
    # The best version of all indexes, as pip does; not that of the first index that has the package.
    export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
}

# Installs $what with a command. The build uses the pinned setuptools.
_install_with() {
    "$@" -c constraints.txt setuptools && "$@" -c constraints.txt --no-build-isolation -e "$what"
}

_install() {
    local extras="$1" what=. began=$SECONDS python="$_VENV/bin/python" version uv
    version="$(_venv_version)"
    ! grep -qs '^extras: dev$' "$_STAMP" || extras=dev # what the tests need stays
    [ "$extras" = run ] || what='.[dev]'
    if "$python" -c '' 2>/dev/null && ! grep -qsx unfinished "$_STAMP" && [ "${_BASE_VERSION:-$version}" = "$version" ]; then
        _say "bringing .venv up to date"
        [ ! -f "$_STAMP" ] || echo unfinished >"$_STAMP"
    else
        [ -f "$_STAMP" ] || [ ! -f "$_VENV/pyvenv.cfg" ] || _die ".venv is of another Python, and somebody else made it." \
            "Remove it, or activate an environment that has titanlite."
        [ -n "$_BASE" ] || _find_base
        _say "making .venv with $_BASE ($_BASE_VERSION), once"
        echo unfinished >"$_STAMP"
        find "$_VENV/" -mindepth 1 -maxdepth 1 ! -name 'titanlite.*' -exec rm -rf {} +
        "$_BASE" -m venv "$(cd "$_VENV" && pwd -P)" || _die "$_BASE -m venv failed."
    fi
    # A user-wide `pip --user` setting cannot work in a virtual environment.
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0
    uv="$(command -v uv)" || { "$python" -m pip install -q -c constraints.txt uv && uv="$_VENV/bin/uv"; }
    if ! { [ -n "$uv" ] && _pip_settings_for_uv "$python" && _install_with "$uv" pip install --python "$python"; }; then
        _say "uv cannot be used here; pip installs the same, which takes longer"
        _install_with "$python" -m pip install || _die "the installation failed; the lines above say why." \
            "Is there a network, and space on the disk? pip's settings hold (pip config list). The same command starts over."
    fi
    # Writes the byte code of what is imported, which else each process of the first run makes for itself.
    env -u PYTHONDONTWRITEBYTECODE "$python" -c 'import torch, titanlite.trainer' || _die "titanlite cannot be imported."
    _stamp_text "$extras" >"$_STAMP.new" && mv "$_STAMP.new" "$_STAMP" || _die "cannot write $_STAMP."
    _say "ready after $((SECONDS - began)) s"
}

# setup_env run|dev: see above. Ends the script with 1 where there is no way.
setup_env() {
    local extras="$1" prefix python
    _BASE="" _BASE_VERSION=""
    PATH="${PATH//$_VENV\/bin:/}" # .venv may be the active environment, but is not the base to make it from
    for prefix in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
        [ -z "$prefix" ] || [ "$prefix" -ef "$_VENV" ] || ! _use_if_installed "$prefix/bin/python" "$extras" || return 0
    done
    [ -z "${PYTHON:-}" ] || _find_base
    if ! _is_ready "$extras"; then
        for python in python python3; do
            [ -z "${PYTHON:-}" ] && python="$(command -v "$python")" && _use_if_installed "$python" "$extras" && return 0
        done
        (
            trap 'exit 130' INT TERM # else an installer that was interrupted is taken for one that failed
            cd "$TITANLITE_ROOT" || exit
            [ -n "$_BASE" ] || "$_VENV/bin/python" -c '' 2>/dev/null || _find_base
            _lock "${_BASE:-$_VENV/bin/python}"
            _is_ready "$extras" || _install "$extras"
        ) >&2 </dev/null || exit
    fi
    _use "$_VENV/bin/python"
}
