//! The functions of `include/flash_attn_rocm.h`, on top of candle-flash-rocm's planner and launcher.
//!
//! [`structs`] has the header's structs, [`call`] turns them into the crate's calls. Here are errors, handles and panics.

#![warn(missing_docs, clippy::pedantic)]
// Every exported function takes addresses of a C program: the header says what they have to be.
#![allow(clippy::missing_safety_doc)]

mod call;
mod growing;
mod structs;

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;

use candle_flash_rocm::driver::{Kernels, Platform};
use candle_flash_rocm::raw::{self, Call, Plan, Scratch};
use candle_flash_rocm::store::Stores;
use candle_flash_rocm::{Error, Result};

use structs::{AppendCall, BackwardCall, ForwardCall};

const OK: c_int = 0;
const INTERNAL: c_int = 8;

/// `flash_attn_rocm` of the header.
pub struct Opened {
    kernels: Arc<Kernels>,
    target: CString,
}

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// The header's number of an error's kind.
fn status(error: &Error) -> c_int {
    match error {
        Error::Argument { .. } => 1,
        Error::Unsupported(_) => 2,
        Error::MissingKernel { .. } => 3,
        Error::Store { .. } => 4,
        Error::OutOfMemory { .. } => 5,
        Error::WrongDevice(_) => 6,
        Error::Driver { .. } => 7,
        _ => INTERNAL,
    }
}

fn fail(code: c_int, message: &str) -> c_int {
    let text = message.replace('\0', "\\0");
    MESSAGE.set(CString::new(text).unwrap_or_default());
    code
}

/// Runs an exported function's work: its error becomes the thread's message and a number. A panic becomes `INTERNAL`.
fn answer(work: impl FnOnce() -> Result<()>) -> c_int {
    MESSAGE.set(CString::default());
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => OK,
        Ok(Err(error)) => fail(status(&error), &error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
            fail(INTERNAL, &format!("defect in libflash_attn_rocm, please report it: {text}"))
        }
    }
}

/// What a pointer of the caller points to.
///
/// # Safety
///
/// The address is null or of a `T` that lives as long as the exported function runs.
unsafe fn pointed<'a, T>(name: &'static str, address: *const T) -> Result<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { address.as_ref() }.ok_or_else(|| Error::argument(name, "NULL", "an address"))
}

/// # Safety
///
/// As [`pointed`], for an address that is written to.
unsafe fn written<'a, T>(name: &'static str, address: *mut T) -> Result<&'a mut T> {
    // SAFETY: the caller's promise.
    unsafe { address.as_mut() }.ok_or_else(|| Error::argument(name, "NULL", "an address to write to"))
}

/// The caller's scratch memory.
fn scratch_of(scratch: *mut c_void, bytes: usize) -> Result<Scratch> {
    if scratch.is_null() && bytes != 0 {
        return Err(Error::argument("scratch", format!("NULL and {bytes} bytes"), "an address, or NULL and 0 bytes"));
    }
    Scratch::new(scratch as u64, bytes)
}

fn launch(opened: &Opened, call: &Call, scratch: *mut c_void, bytes: usize, stream: *mut c_void) -> Result<()> {
    let scratch = scratch_of(scratch, bytes)?;
    // SAFETY: the header asks for a stream of this GPU that lives until the call has been launched.
    let stream = unsafe { opened.kernels.gpu().foreign_stream(stream as usize) };
    // SAFETY: the header asks for memory that is as large as sizes and strides say and lives long enough.
    unsafe { call.launch(&opened.kernels, &stream, scratch) }
}

fn launch_plan(plan: &Plan, call: &Call, scratch: *mut c_void, bytes: usize, stream: *mut c_void) -> Result<()> {
    let scratch = scratch_of(scratch, bytes)?;
    // SAFETY: as in `launch`.
    let stream = unsafe { plan.kernels().gpu().foreign_stream(stream as usize) };
    // SAFETY: as in `launch`.
    unsafe { plan.launch(&stream, call, scratch) }
}

fn scratch_bytes(opened: &Opened, call: &Call, bytes: &mut usize) -> Result<()> {
    *bytes = call.scratch_bytes(&opened.kernels)?;
    Ok(())
}

fn scratch_bytes_up_to(opened: &Opened, call: &Call, bytes: &mut usize) -> Result<()> {
    *bytes = call.scratch_bytes_up_to(&opened.kernels)?;
    Ok(())
}

/// Writes a new plan of a call to an address.
fn make_plan(opened: &Opened, call: &Call, plan: &mut *mut Plan) -> Result<()> {
    *plan = std::ptr::null_mut();
    *plan = Box::into_raw(Box::new(Plan::new(opened.kernels.clone(), call)?));
    Ok(())
}

/// See the header.
#[no_mangle]
pub extern "C" fn flash_attn_rocm_version() -> *const c_char {
    const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => c"",
    };
    VERSION.as_ptr()
}

/// See the header.
#[no_mangle]
pub extern "C" fn flash_attn_rocm_error() -> *const c_char {
    MESSAGE.with_borrow(|message| message.as_ptr())
}

/// See the header.
#[no_mangle]
pub unsafe extern "C" fn flash_attn_rocm_open(stores: *const c_char, device: c_int, opened: *mut *mut Opened) -> c_int {
    answer(|| {
        // SAFETY: the header's promises: an address to write to, and a text that ends with a null or no text.
        let opened = unsafe { written("opened", opened) }?;
        *opened = std::ptr::null_mut();
        let ordinal = usize::try_from(device)
            .map_err(|_| Error::argument("device", device, "a GPU's number, 0 for the first"))?;
        let stores = if stores.is_null() {
            Stores::from_environment()?
        } else {
            // SAFETY: as above.
            let path = unsafe { CStr::from_ptr(stores) };
            let path = path.to_str().map_err(|_| Error::argument("stores", format!("{path:?}"), "a path in UTF-8"))?;
            Stores::open(path)?
        };
        let kernels = Arc::new(Kernels::open(Platform::Hip, ordinal, &stores)?);
        let target = CString::new(kernels.gpu().target()).unwrap_or_default();
        *opened = Box::into_raw(Box::new(Opened { kernels, target }));
        Ok(())
    })
}

/// See the header.
#[no_mangle]
pub unsafe extern "C" fn flash_attn_rocm_close(opened: *mut Opened) {
    answer(|| {
        if !opened.is_null() {
            // SAFETY: the address is of `flash_attn_rocm_open`, and nobody uses it any more.
            drop(unsafe { Box::from_raw(opened) });
        }
        Ok(())
    });
}

/// See the header.
#[no_mangle]
pub unsafe extern "C" fn flash_attn_rocm_target(opened: *const Opened) -> *const c_char {
    // SAFETY: the address is null or of `flash_attn_rocm_open`.
    unsafe { opened.as_ref() }.map_or(c"".as_ptr(), |opened| opened.target.as_ptr())
}

/// Functions that launch a call: with a GPU's kernels or with a plan.
macro_rules! launching {
    ($($function:ident: $name:literal $Owner:ident, $Call:ident, $launch:ident;)*) => {$(
        /// See the header.
        #[no_mangle]
        pub unsafe extern "C" fn $function(
            owner: *const $Owner,
            call: *const $Call,
            scratch: *mut c_void,
            bytes: usize,
            stream: *mut c_void,
        ) -> c_int {
            // SAFETY: the header's promises about the two addresses.
            answer(|| unsafe { $launch(pointed($name, owner)?, &$Call::read(call)?, scratch, bytes, stream) })
        }
    )*};
}

launching! {
    flash_attn_rocm_forward: "opened" Opened, ForwardCall, launch;
    flash_attn_rocm_backward: "opened" Opened, BackwardCall, launch;
    flash_attn_rocm_plan_forward: "plan" Plan, ForwardCall, launch_plan;
    flash_attn_rocm_plan_backward: "plan" Plan, BackwardCall, launch_plan;
}

/// Functions that compute something about a call before its launch, and write it.
macro_rules! describing {
    ($($function:ident: $Call:ident, $name:literal $Result:ty, $describe:ident;)*) => {$(
        /// See the header.
        #[no_mangle]
        pub unsafe extern "C" fn $function(opened: *const Opened, call: *const $Call, result: *mut $Result) -> c_int {
            answer(|| {
                // SAFETY: the header's promises about the three addresses.
                let (opened, call) = unsafe { (pointed("opened", opened)?, $Call::read(call)?) };
                // SAFETY: as above.
                $describe(opened, &call, unsafe { written($name, result) }?)
            })
        }
    )*};
}

describing! {
    flash_attn_rocm_forward_scratch: ForwardCall, "bytes" usize, scratch_bytes;
    flash_attn_rocm_backward_scratch: BackwardCall, "bytes" usize, scratch_bytes;
    flash_attn_rocm_forward_scratch_up_to: ForwardCall, "bytes" usize, scratch_bytes_up_to;
    flash_attn_rocm_forward_plan: ForwardCall, "plan" *mut Plan, make_plan;
    flash_attn_rocm_backward_plan: BackwardCall, "plan" *mut Plan, make_plan;
}

/// See the header.
#[no_mangle]
pub unsafe extern "C" fn flash_attn_rocm_append(
    opened: *const Opened,
    call: *const AppendCall,
    stream: *mut c_void,
) -> c_int {
    answer(|| {
        // SAFETY: the header's promises about the two addresses.
        let (opened, call) = unsafe { (pointed("opened", opened)?, AppendCall::read(call)?) };
        // SAFETY: as in `launch`.
        let stream = unsafe { opened.kernels.gpu().foreign_stream(stream as usize) };
        // SAFETY: as in `launch`.
        unsafe { raw::append(&opened.kernels, &stream, &call) }
    })
}

/// See the header.
#[no_mangle]
pub unsafe extern "C" fn flash_attn_rocm_plan_scratch(plan: *const Plan) -> usize {
    // SAFETY: the address is null or of a plan.
    unsafe { plan.as_ref() }.map_or(0, Plan::scratch_bytes)
}

/// See the header.
#[no_mangle]
pub unsafe extern "C" fn flash_attn_rocm_plan_free(plan: *mut Plan) {
    answer(|| {
        if !plan.is_null() {
            // SAFETY: the address is of `flash_attn_rocm_forward_plan` or `_backward_plan`, and nobody uses it any more.
            drop(unsafe { Box::from_raw(plan) });
        }
        Ok(())
    });
}
