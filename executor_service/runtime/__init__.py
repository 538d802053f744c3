"""The loaded model beside its worker, and the state in which the service is."""
