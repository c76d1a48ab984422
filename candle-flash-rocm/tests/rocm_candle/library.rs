//! Attention of tensors on candle's ROCm device, forward and backward, for tests/resident_calls.py.

use std::ffi::{c_char, c_int, CStr};

use candle_core::rocm_backend::WAIT;
use candle_core::{DType, Device, Error, Result, Tensor, Var};
use candle_flash_rocm::driver::{Driver, Gpu, Platform};
use candle_flash_rocm::flash_attn;
use serde::{Deserialize, Serialize};

/// Tensors by their shapes and elements, in the order q, k, v and the gradient of the result.
#[derive(Deserialize)]
struct Request {
    shapes: [Vec<usize>; 4],
    elements: [Vec<f32>; 4],
    dtype: String,
    scale: f32,
    causal: bool,
}

/// The result, and the gradients of q, k and v.
#[derive(Serialize)]
struct Answer {
    out: Vec<f32>,
    gradients: Vec<Vec<f32>>,
}

impl Request {
    fn tensor(&self, index: usize) -> Result<Tensor> {
        let dtype = if self.dtype == "fp16" { DType::F16 } else { DType::BF16 };
        let tensor = Tensor::from_vec(self.elements[index].clone(), self.shapes[index].clone(), &Device::Cpu)?;
        tensor.to_dtype(dtype)?.to_device(&Device::new_rocm(0)?)
    }

    fn run(&self) -> Result<Answer> {
        let [q, k, v] = [0, 1, 2].map(|index| Var::from_tensor(&self.tensor(index)?));
        let (q, k, v) = (q?, k?, v?);
        let out = flash_attn(&q, &k, &v, self.scale, self.causal)?;
        let values = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1();
        // Without a backward to come, the forward keeps its sums elsewhere.
        let alone = flash_attn(&q.detach(), &k.detach(), &v.detach(), self.scale, self.causal)?;
        if values(&alone)? != values(&out)? {
            return Err(Error::Msg("a forward without a backward gives another result".into()));
        }
        let found = (&out * self.tensor(3)?)?.sum_all()?.backward()?;
        let gradients: Result<_> = [&q, &k, &v]
            .into_iter()
            .map(|input| found.get(input).map_or_else(|| Err(Error::Msg("no gradient".into())), &values))
            .collect();
        Ok(Answer { out: values(&out)?, gradients: gradients? })
    }
}

/// Waits for the kernels of the first GPU.
fn wait() {
    let gpu = Driver::open(Platform::Hip).and_then(|driver| Gpu::open(driver, 0)).expect("a GPU");
    // SAFETY: the default stream is always there.
    unsafe { gpu.foreign_stream(0) }.wait().expect("kernels that end well");
}

/// Runs a request, JSON. The answer, JSON or the text of an error, has at most `capacity` bytes. Returns 0 or 1.
///
/// # Safety
///
/// The request ends with a null, and the answer has `capacity` bytes.
#[no_mangle]
pub unsafe extern "C" fn rocm_candle_run(request: *const c_char, answer: *mut u8, capacity: usize) -> c_int {
    WAIT.get_or_init(|| wait);
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(request) }.to_string_lossy();
    let parsed = serde_json::from_str::<Request>(&text).map_err(|error| error.to_string());
    let found = parsed.and_then(|request| request.run().map_err(|error| error.to_string()));
    let (status, text) = match found.and_then(|answer| serde_json::to_string(&answer).map_err(|e| e.to_string())) {
        Ok(text) => (0, text),
        Err(text) => (1, text),
    };
    let bytes = &text.as_bytes()[..text.len().min(capacity - 1)];
    // SAFETY: the caller's promise.
    unsafe {
        answer.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        answer.add(bytes.len()).write(0);
    }
    status
}
