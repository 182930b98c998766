"""What the tests of the parameter server share: toy models, servers, peers, transcriptions of the papers."""
