"""Built code and decisions: keys and files come in, checked entries come out.

Nothing here compiles, and nothing reads or removes a file except through the store, apart from the
lock file that a user names. `RedisRemoteCacheBackend` is looked up here whenever it is used: assign
another class with its methods to share decisions in another way.
"""

from perfuse.cache.redis_backend import RedisRemoteCacheBackend as RedisRemoteCacheBackend
from perfuse.cache.redis_backend import RemoteCacheBackend as RemoteCacheBackend
