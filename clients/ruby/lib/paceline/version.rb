# frozen_string_literal: true

module Paceline
  VERSION = '0.1.0'
end
