#include "paceline/client.h"

namespace paceline {

void Collector::add(const v1::GenerateResponse& event) {
  while (completions_.size() <= event.index()) completions_.emplace_back().set_index(completions_.size() - 1);
  v1::Completion& one = completions_[event.index()];
  if (event.has_finished()) {
    *one.mutable_finished() = event.finished();
    return;
  }
  const v1::Delta& delta = event.delta();
  one.mutable_token_ids()->MergeFrom(delta.token_ids());
  one.mutable_text()->append(delta.text());
  one.mutable_logprobs()->MergeFrom(delta.logprobs());
  one.mutable_reasoning()->append(delta.reasoning());
  for (const v1::ToolCallDelta& call : delta.tool_calls()) {
    if (static_cast<int>(call.index()) == one.tool_calls_size()) {
      v1::ToolCall& begun = *one.add_tool_calls();
      begun.set_id(call.id());
      begun.set_name(call.name());
    }
    one.mutable_tool_calls(call.index())->mutable_arguments()->append(call.arguments());
  }
}

}  // namespace paceline
