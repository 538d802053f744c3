// Which of several schedulers gets a request: AFFINITY in scheduler.proto. Requests with the same beginning go to the
// same scheduler, whose prefix cache then has it.

#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "paceline/client.h"

namespace paceline {

// 32 bytes that requests with the same beginning share. `own`: the caller's key, in place of them; empty: none.
std::string affinity_key(const v1::GenerateRequest& request, const std::string& own);

// The indexes of the addresses, that of the scheduler with the highest weight first.
std::vector<size_t> preference(const std::string& key, const std::vector<std::string>& addresses);

// The first of the order whose load is within its share. `loads`: the client's live calls, by address.
size_t choice(const std::vector<size_t>& order, const std::vector<size_t>& loads);

}  // namespace paceline
