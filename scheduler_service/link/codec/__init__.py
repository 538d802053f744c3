"""Where protobuf ends towards executors: steps and their answers, the handshake."""
