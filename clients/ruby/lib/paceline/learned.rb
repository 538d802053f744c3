# frozen_string_literal: true

require 'ipaddr'
require 'set'

require 'paceline/scheduler/v1/scheduler_pb'

module Paceline
  # What an entry of a directory says of a scheduler. `load`: running and waiting sequences.
  Learned = Struct.new(
    :address, :instance, :tls_name, :model_fingerprint, :load, :drains, :adapters, keyword_init: true
  ) do
    def self.of(entry)
      new(
        address: entry.address, instance: entry.instance, tls_name: entry.tls_name,
        model_fingerprint: entry.model_fingerprint, load: (entry.load&.running || 0) + (entry.load&.waiting || 0),
        drains: entry.state == :SCHEDULER_STATE_DRAINING, adapters: Set.new(entry.adapters)
      )
    end

    # One start of the scheduler at an address.
    def start
      [address, instance]
    end
  end

  # Addresses that directories have, and given ones.
  module Address
    # What is not of this form gRPC may take for a socket, a list of addresses or another target.
    HOST_PORT = /\A(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}\z/
    # What gRPC takes for a scheme, though a port follows.
    NO_HOST = /\A(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds|passthrough|google-c2p):/i

    module_function

    def host_port?(address)
      HOST_PORT.match?(address) && !NO_HOST.match?(address)
    end

    # Whether it can't be reached from another machine.
    def loopback?(address)
      return true if address.start_with?('unix:', 'unix-abstract:')

      host = address.rpartition(':').first.delete('[]')
      host == 'localhost' || IPAddr.new(host).loopback?
    rescue IPAddr::Error
      false
    end
  end
end
