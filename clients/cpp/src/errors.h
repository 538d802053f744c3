#pragma once

#include <string>

#include <grpcpp/support/status.h>

#include "paceline/error.h"

namespace paceline {

// The Error for a status that is not OK.
Error error_of(const grpc::Status& status);

// The Error for an answer that is incomplete, or makes no sense, though its status is OK.
Error incomplete(const std::string& message);

}  // namespace paceline
