# frozen_string_literal: true

require 'paceline/scheduler/v1/scheduler_pb'

module Paceline
  # Joins the events of a stream into completions.
  class Collector
    # What the events so far make, by index. Until its end has come, a completion has no `finished`.
    attr_reader :completions

    def initialize
      @completions = []
    end

    # Takes the next event of the stream.
    def add(event)
      one = @completions[event.index] ||= Scheduler::V1::Completion.new(index: event.index)
      event.delta ? join(one, event.delta) : one.finished = event.finished
    end

    private

    def join(one, delta)
      one.text += delta.text
      one.reasoning += delta.reasoning
      delta.token_ids.each { |id| one.token_ids << id }
      delta.logprobs.each { |logprobs| one.logprobs << logprobs }
      delta.tool_calls.each do |call|
        one.tool_calls << Scheduler::V1::ToolCall.new(id: call.id, name: call.name) if call.index == one.tool_calls.size
        one.tool_calls[call.index].arguments += call.arguments
      end
    end
  end
end
