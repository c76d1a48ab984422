//! A test that limits its own address space, as a process of its own.

use std::env;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use candle_core::Result;
use candle_flash_rocm::Error;

/// The variable that tells a test which it is: the parent, or the child that limits its own address space.
const CHILD: &str = "CANDLE_FLASH_ROCM_TEST_LIMITS";

/// Bytes of this process's address space.
fn address_space() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("a file of Linux");
    4096 * pages.split(' ').next().and_then(|pages| pages.parse::<usize>().ok()).expect("a number of pages")
}

/// Runs a call with so many bytes of address space in addition to what the process has.
pub fn with_bytes<T>(bytes: usize, call: impl FnOnce() -> T) -> T {
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the function writes the structure.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut before) }, 0, "getrlimit");
    let set = |limit: libc::rlimit| {
        // SAFETY: the function reads the structure.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0, "setrlimit");
    };
    set(libc::rlimit { rlim_cur: (address_space() + bytes) as u64, ..before });
    let result = call();
    set(before);
    result
}

/// Runs the call with ever more address space, from so many bytes on and in such steps, until it succeeds. Each error has
/// to be one about memory.
pub fn sweep(from: usize, step: usize, call: impl Fn() -> Result<()>) {
    call().expect("a call without a limit"); // starts the threads
    for bytes in (from..1 << 30).step_by(step) {
        println!("with {bytes} bytes");
        let Err(error) = with_bytes(bytes, &call) else {
            assert!(bytes > from + 8 * step, "the tensors are too small");
            return println!("refused, up to {bytes} bytes");
        };
        assert!(matches!(Error::in_candle(&error), Some(Error::OutOfMemory { .. })), "{error}");
        assert!(error.to_string().contains("pass fewer sequences"), "{error}");
    }
    panic!("no limit was large enough");
}

/// Runs this test as a process of its own, with this many of rayon's threads, and fails if it fails or gets a signal.
pub fn spawn(test: &str, threads: usize) {
    let mut child = Command::new(env::current_exe().expect("a path"));
    child.args(["--exact", test, "--nocapture"]).env(CHILD, "1").env("RAYON_NUM_THREADS", threads.to_string());
    // So that glibc reserves no 64 MiB for each thread, and gives blocks of 64 KiB back when they are freed.
    child.env("MALLOC_ARENA_MAX", "1").env("MALLOC_MMAP_THRESHOLD_", "65536");
    let done = child.output().expect("a process");
    let text = [done.stdout, done.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert_eq!(done.status.signal(), None, "{text}");
    assert!(done.status.success() && text.contains("refused"), "{text}");
}

pub fn is_child() -> bool {
    env::var_os(CHILD).is_some()
}
