# What quickstart.sh and test.sh share; to be sourced. Finds or makes everything they need, and changes nothing that
# is there already. Set PYTHON or JAVA_HOME to choose, DISTKERAS_VENV for another place than .venv, and
# DISTKERAS_LOCKED=1 for the packages that scripts/lock-tests.txt lists.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DISTKERAS_VENV:-$root/.venv}

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

# apt_install PACKAGE...: fails where that cannot be done.
apt_install() {
  local as_root=()
  command -v apt-get >/dev/null || return 1
  if ((EUID != 0)); then
    command -v sudo >/dev/null || return 1
    as_root=(sudo)
  fi
  say "Installing $* with apt-get"
  "${as_root[@]}" apt-get update -qq >/dev/null || return 1
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Prints the major version of the Java program $1; nothing where that is no Java.
java_major() {
  "$1" -version 2>&1 | sed -n 's/.* version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p'
}

find_java() {
  local java major
  for java in "${JAVA_HOME:+$JAVA_HOME/bin/java}" "$(command -v java)" /usr/lib/jvm/*/bin/java; do
    [[ -x $java ]] || continue
    major=$(java_major "$java") || continue
    if ((${major:-0} >= 17)); then
      if [[ $java == "$(command -v java)" ]]; then
        unset JAVA_HOME # Spark would prefer it, and it may be an old one
      else
        JAVA_HOME=${java%/bin/java}
        export JAVA_HOME
      fi
      return 0
    fi
  done
  return 1
}

ensure_java() {
  find_java && return
  apt_install openjdk-17-jre-headless || apt_install default-jre-headless || true
  find_java || die "Spark needs Java 17 or newer. Install it (on Debian: apt-get install openjdk-17-jre-headless)," \
    "or set JAVA_HOME to where it is."
}

# Best effort: without the package, Keras downloads the same data.
ensure_dataset() {
  [[ -d /usr/share/datasets/fashion-mnist ]] || apt_install dataset-fashion-mnist ||
    say "Debian's dataset-fashion-mnist is not to be had: leaving Fashion-MNIST to keras.datasets"
}

# Sets `python` to an interpreter that TensorFlow has wheels for.
find_python() {
  for python in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13; do
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && return
  done
  die "Python 3.11 to 3.13 is needed. Install one, or set PYTHON to it."
}

make_venv() {
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
  find_python
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then # Debian keeps these in a package of their own
    apt_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" ||
      die "$python cannot make virtual environments. On Debian: apt-get install python3-venv"
  fi
  say "Making a virtual environment in $venv"
  "$python" -m venv --clear "$venv"
}

# A digest of everything that decides what an installation holds.
source_digest() {
  (
    cd "$root"
    "$venv/bin/python" -VV
    [[ -z ${DISTKERAS_LOCKED:-} ]] || cat scripts/lock-*.txt
    find pyproject.toml setup.py distkeras ps transformers -type f ! -name '*.pyc' -print0 |
      LC_ALL=C sort -z | xargs -0 sha256sum
  ) | sha256sum | cut -d ' ' -f 1
}

# ensure_installed EXTRA: this package with its extra in the virtual environment; fast when nothing has changed. With
# DISTKERAS_LOCKED, the packages that it needs are those of scripts/lock-EXTRA.txt, with their hashes, else the newest.
ensure_installed() {
  local extra=$1 stamp=$venv/distkeras.stamp digest pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)
  make_venv
  digest=$(source_digest)
  if [[ $(head -n 1 "$stamp" 2>/dev/null) != "$digest" ]]; then
    rm -f "$stamp"
  elif grep -qx "$extra" "$stamp"; then
    return
  fi
  say "Installing distkeras[$extra] into $venv (TensorFlow and Spark are large: the first time takes minutes)"
  rm -rf "$root/build/lib" # setuptools would pack modules that were deleted since
  if [[ -n ${DISTKERAS_LOCKED:-} ]]; then
    "${pip[@]}" install --require-hashes --no-deps -r "$root/scripts/lock-$extra.txt" ||
      die "pip could not install the locked packages; see above. Without DISTKERAS_LOCKED, the newest are installed"
  fi
  "${pip[@]}" install "$root[$extra]" ||
    die "pip could not install distkeras[$extra]; see above"
  [[ -e $stamp ]] || printf '%s\n' "$digest" >"$stamp"
  printf '%s\n' "$extra" >>"$stamp"
}

# Python, and the workers that Spark starts with `python -m`, shall find the installed package, not the folder that
# they happen to start in.
export PYTHONSAFEPATH=1
