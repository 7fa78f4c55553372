#!/usr/bin/env bash
# Builds the image with buildah, which needs no daemon, and runs its smoke test:
#
#     scripts/container/build.sh registry.example.org/jaxdist:1 [BUILD-OPTION...]
#
# BASE=debian makes the base from Debian's own packages, for a machine that reaches no registry of
# images (as root, with mmdebstrap or debootstrap). BASE=host takes this machine's Debian in its place
# (as root): /usr and /var are mounted and the image holds the rest, so that it can be tried here and
# nowhere else. BASE=IMAGE takes another. Options go to `buildah bud`, such as
# --volume /etc/pip.conf:/etc/pip.conf:ro where packages come through a mirror, and
# --build-arg EXTRAS=s3 for an image without CUDA. SMOKE=short trains four steps alone.
#
# UNPACKED=DIR also writes the image's files there, for Charliecloud's ch-run (as root, or all of this
# under `buildah unshare`).
set -euo pipefail

image=${1:?"usage: [BASE=debian] $0 IMAGE [BUILD-OPTION...]"}
shift
root=$(cd "$(dirname "$0")/../.." && pwd)
# Processes of a build share the host's network and need no privilege of their own.
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}

debian_base() {
    local work container packages=python3,python3-venv,ca-certificates
    work=$(mktemp -d)
    if command -v mmdebstrap >/dev/null; then
        mmdebstrap --quiet --variant=apt --include=$packages bookworm "$work/base.tar"
    else
        debootstrap --variant=minbase --include=$packages bookworm "$work/base" >"$work/log" ||
            { tail "$work/log" >&2; return 1; }
    fi
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$work"/base* / >/dev/null
    buildah commit --quiet --rm "$container" localhost/jaxdist-base >/dev/null
    rm -rf "$work"
}

host_base() {
    local container place
    container=$(buildah from scratch)
    place=$(buildah mount "$container")
    cp --archive --parents /etc /bin /lib /lib64 /sbin "$place"
    sed -i '/^[^:]*:[^:]*:1000:/d' "$place"/etc/{passwd,group} # the number of the image's own user
    mkdir --mode=1777 "$place/tmp"
    mkdir -p "$place"/{usr,var,root,home,opt,proc,sys,dev,run}
    buildah umount "$container" >/dev/null
    buildah commit --quiet --rm "$container" localhost/jaxdist-base >/dev/null
}

mounts=()
case "${BASE:-}" in
debian) debian_base ;;
host) host_base && mounts=(--volume /usr:/usr:O --volume /var:/var:O) ;;
esac
case "${BASE:-}" in debian | host) BASE=localhost/jaxdist-base ;; esac
buildah bud ${BASE:+--build-arg BASE="$BASE"} "${mounts[@]}" "$@" \
    --tag "$image" --file "$root/Containerfile" "$root"

container=$(buildah from "$image")
trap 'buildah rm "$container" >/dev/null' EXIT
buildah run ${SMOKE:+--env SMOKE="$SMOKE"} "${mounts[@]}" \
    --volume "$root/scripts/container:/smoke:ro" "$container" -- /bin/bash /smoke/smoke.sh

if [ -n "${UNPACKED:-}" ]; then
    mkdir -p "$UNPACKED"
    cp --archive --reflink=auto "$(buildah mount "$container")/." "$UNPACKED"
    buildah umount "$container" >/dev/null
    mkdir -p "$UNPACKED/ch" # what ch-run --set-env reads: the image's own variables
    buildah inspect --type image --format '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' "$image" \
        >"$UNPACKED/ch/environment"
fi
