#!/bin/sh
# Writes schedulerv1/ and internal/details/ anew from the repository's protos. Needs protoc; builds its plugins for Go from the sources
# that `go build` finds, so that they fit the libraries.
set -eu
cd "$(dirname "$0")"
module=github.com/paceline/paceline/clients/go
scheduler=paceline/scheduler/v1/scheduler.proto
details=paceline/client/status_details.proto
out=${1:-.}
plugins=$(mktemp -d)
trap 'rm -rf "$plugins"' EXIT
go build -o "$plugins/protoc-gen-go" google.golang.org/protobuf/cmd/protoc-gen-go
go build -o "$plugins/protoc-gen-go-grpc" google.golang.org/grpc/cmd/protoc-gen-go-grpc
mkdir -p "$out"
PATH="$plugins:$PATH" protoc -I../../protos -I../shared \
    --go_out="$out" --go_opt="M$scheduler=$module/schedulerv1,M$details=$module/internal/details,module=$module" \
    --go-grpc_out="$out" --go-grpc_opt="M$scheduler=$module/schedulerv1,M$details=$module/internal/details,module=$module" \
    "$scheduler" "$details"
