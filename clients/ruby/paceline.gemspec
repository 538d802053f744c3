# frozen_string_literal: true

require_relative 'lib/paceline/version'

Gem::Specification.new do |spec|
  spec.name = 'paceline'
  spec.version = Paceline::VERSION
  spec.summary = 'Client of Paceline: a language model behind gRPC, as streams of tokens'
  spec.authors = ['The Paceline authors']
  spec.license = 'Apache-2.0'
  spec.required_ruby_version = '>= 3.1'
  spec.files = Dir['lib/**/*.rb', 'README.md', base: __dir__]
  # The floors are what the tests use.
  spec.add_dependency 'google-protobuf', '>= 3.21', '< 4' # what the generated code is for
  spec.add_dependency 'googleapis-common-protos-types', '>= 1.4' # google.rpc: the details of a status
  spec.add_dependency 'grpc', '>= 1.51'
end
