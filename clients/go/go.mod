module github.com/paceline/paceline/clients/go

go 1.19

// The versions that the tests use. Later ones are compatible.
require (
	google.golang.org/grpc v1.33.3
	google.golang.org/protobuf v1.28.1
)
