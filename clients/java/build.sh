#!/bin/sh
# Builds the client, the example and the scenario's runner into a folder with javac and Debian's jars, writes the
# classpath there, for `java @FOLDER/classpath CLASS`, and runs the tests. With Maven use pom.xml instead.
# Usage: build.sh FOLDER
set -eu
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")"

path=$out/classes
for jar in grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub protobuf protobuf-util \
    guava gson jsr305 geronimo-annotation-1.3-spec perfmark-api \
    netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-codec-socks netty-common netty-handler \
    netty-handler-proxy netty-resolver netty-tcnative netty-transport netty-transport-native-unix-common; do
    file=/usr/share/java/$jar.jar
    [ -e "$file" ] || { echo "$file is missing: .ci/clients lists the packages" >&2; exit 1; }
    path=$path:$file
done

rm -rf "$out/generated" "$out/classes" "$out/tests"
mkdir -p "$out/generated" "$out/classes" "$out/tests"
protoc -I../../protos -I../shared --java_out="$out/generated" --grpc-java_out="$out/generated" \
    --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" \
    paceline/scheduler/v1/scheduler.proto paceline/client/status_details.proto
find "$out/generated" -name '*.java' >"$out/generated/files"
javac -nowarn -Xlint:none -proc:none -d "$out/classes" -cp "$path" "@$out/generated/files"
lint=-Xlint:all,-processing,-classfile,-path
find src/main src/example src/scenario -name '*.java' >"$out/files"
javac $lint -Werror -proc:none -d "$out/classes" -cp "$path" "@$out/files"

# TLS: Debian's Netty looks for the library under a name that Debian's package of it does not have.
mkdir -p "$out/native"
cp "/usr/lib/$(uname -m)-linux-gnu/jni/libnetty-tcnative.so" "$out/native/libnetty_tcnative.so"
printf -- '-Djava.library.path=%s\n-cp %s\n' "$out/native" "$path" >"$out/classpath"

find src/tests -name '*.java' >"$out/tests/files"
javac $lint -Werror -proc:none -d "$out/tests" -cp "$path" "@$out/tests/files"
java "-Djava.library.path=$out/native" -cp "$out/tests:$path" com.paceline.client.Tests
