"""The noticeboard: identities, signed records and the hivemind DHT they stand on."""
