# frozen_string_literal: true

require 'google/protobuf/well_known_types'
require 'google/rpc/error_details_pb'
require 'grpc'

module Paceline
  # A call that failed, with the details that the service attached.
  class Error < StandardError
    # The status' name, such as :INVALID_ARGUMENT. RESOURCE_EXHAUSTED and UNAVAILABLE mean, but for StreamLost, that
    # nothing was emitted. DATA_LOSS: the service reports success, but the answer is incomplete.
    attr_reader :code
    # The service's name of the cause, such as 'QUEUE_FULL'; '' if it gave none.
    attr_reader :reason
    # What the service added to the reason: a Hash of strings.
    attr_reader :metadata
    # Seconds after which the same request may succeed; nil if the service gave no hint.
    attr_reader :retry_after

    def initialize(message, code:, reason: '', metadata: {}, retry_after: nil)
      super(message)
      @code = code
      @reason = reason
      @metadata = metadata
      @retry_after = retry_after
    end

    # Whether the same request may succeed later: nothing was emitted for it.
    def retryable?
      %i[RESOURCE_EXHAUSTED UNAVAILABLE].include?(code)
    end
  end

  # A stream that was interrupted after events had been received, and could not be continued. What was received is
  # valid but incomplete. The code is UNAVAILABLE.
  class StreamLost < Error
    def initialize(message, reason: '', metadata: {})
      super(message, code: :UNAVAILABLE, reason: reason, metadata: metadata)
    end

    # Something was emitted: the request must not be sent again blindly.
    def retryable?
      false
    end
  end

  # A learned scheduler serves another model than a directory says of it.
  class OtherModel < Error
    def initialize(address)
      super("#{address} is not what a directory says of it", code: :UNAVAILABLE, reason: 'OTHER_MODEL')
    end
  end

  # Errors of gRPC as those of this client.
  module Errors
    CODES = %i[
      OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED
      RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS
      UNAUTHENTICATED
    ].freeze

    module_function

    # The Error for a GRPC::BadStatus or a GRPC::Core::CallError; an Error is one already.
    def from_rpc(error)
      return error if error.is_a?(Error)
      return Error.new(error.message, code: :INTERNAL) unless error.is_a?(GRPC::BadStatus)

      details = details_of(error)
      Error.new(error.details, code: code_of(error, details), **details)
    end

    def incomplete(message)
      Error.new(message, code: :DATA_LOSS)
    end

    def code_of(error, details)
      code = CODES.fetch(error.code, :UNKNOWN)
      # Paceline's services always give a reason. gRPC gives none when a server that stops cancels calls that it has
      # not begun, and when the client is closed.
      return :UNAVAILABLE if code == :CANCELLED && details[:reason].empty?
      # gRPC itself refuses such a message: waiting doesn't help.
      return :INVALID_ARGUMENT if code == :RESOURCE_EXHAUSTED && error.details.include?('larger than max')

      code
    end

    def details_of(error)
      found = { reason: '', metadata: {}, retry_after: nil }
      (error.to_rpc_status&.details || []).each do |detail|
        if (info = detail.unpack(Google::Rpc::ErrorInfo))
          found.update(reason: info.reason, metadata: info.metadata.to_h)
        elsif (info = detail.unpack(Google::Rpc::RetryInfo))
          delay = info.retry_delay&.to_f || 0.0
          found[:retry_after] = delay unless delay.negative?
        end
      end
      found
    rescue Google::Protobuf::ParseError
      found # a peer that writes nonsense there still gave a code and a message
    end
    private_class_method :code_of, :details_of
  end
end
