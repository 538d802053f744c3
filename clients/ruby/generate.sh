#!/bin/sh
# Writes lib/paceline/scheduler/ anew from the repository's protos, with the protoc and grpc_ruby_plugin of the PATH.
# The committed files are those of Debian's protoc 3.21.
# Usage: generate.sh [FOLDER]
set -eu
cd "$(dirname "$0")"
out=${1:-lib}
mkdir -p "$out"
protoc -I../../protos --ruby_out="$out" --grpc_out="$out" \
    --plugin=protoc-gen-grpc="$(command -v grpc_ruby_plugin)" paceline/scheduler/v1/scheduler.proto
