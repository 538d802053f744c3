"""Where protobuf ends towards clients: requests checked, answers and figures written."""
