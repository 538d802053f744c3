// Which of several schedulers gets a request: AFFINITY in scheduler.proto. Requests with the same beginning go to the
// same scheduler, whose prefix cache then has it.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "paceline/client.h"

namespace paceline {

// 32 bytes that requests with the same beginning share. `own`: the caller's key, in place of them; empty: none.
std::string affinity_key(const v1::GenerateRequest& request, const std::string& own);

// The addresses, that of the scheduler with the highest weight first.
std::vector<std::string> preference(const std::string& key, const std::vector<std::string>& addresses);

using LoadOf = std::function<uint64_t(const std::string&)>;

// The first of the order whose load is within its share: the client's live calls there, and the sequences of all
// clients that the directory reports. If none is, the former alone count: one that says in vain that it has none gets
// no more than its share.
std::string choice(const std::vector<std::string>& order, const LoadOf& live, const LoadOf& reported);

}  // namespace paceline
