/* Lets the wall clock of one process be stepped while it runs: preloaded into a Redis server (LD_PRELOAD).
 *
 * CHAOS_CLOCK names a file of 8 bytes, a signed number of microseconds in native order, that is mapped and added to
 * every reading of CLOCK_REALTIME. The monotonic clocks are left alone, as by a real step. Nothing here allocates:
 * jemalloc reads the clock while it initialises, which is what libfaketime cannot bear. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *offset;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) _exit(97); /* A server whose clock cannot be stepped must not look like one whose clock can. */
    void *map = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (map == MAP_FAILED) _exit(97);
    close(file);
    offset = map;
}

static int64_t realtime_us(int64_t *rest_ns) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    if (rest_ns) *rest_ns = now.tv_nsec % 1000;
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000 + (offset ? *offset : 0);
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE) return syscall(SYS_clock_gettime, clock, out);
    int64_t rest, us = realtime_us(&rest);
    out->tv_sec = us / 1000000;
    out->tv_nsec = us % 1000000 * 1000 + rest;
    return 0;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    (void)zone;
    int64_t us = realtime_us(NULL);
    out->tv_sec = us / 1000000;
    out->tv_usec = us % 1000000;
    return 0;
}

time_t time(time_t *out) {
    time_t now = realtime_us(NULL) / 1000000;
    if (out) *out = now;
    return now;
}
